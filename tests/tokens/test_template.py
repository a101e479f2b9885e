"""Chats render as the engine renders them, and a template cannot do harm."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from kvgate.tokens import BadTokenizer, CannotCount, TemplateRefused
from kvgate.tokens.template import ChatTemplate

NOON = datetime(2026, 3, 1, 12, 0)
PLAIN = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}"
PARTS = (
    "{% for m in messages %}[{{ m.role }}|{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}<{{ c.type }}:{{ c.text }}>{% endfor %}{% endif %}]{% endfor %}"
)


def render(source: str | dict[str, str], messages: list[dict[str, Any]] | None = None, **fields: Any) -> str:
    messages = [{"role": "user", "content": "hi"}] if messages is None else messages
    return (
        ChatTemplate(source, {"bos_token": "<s>"}, lambda: NOON).render({"messages": messages, **fields}).text
    )


def test_text_parts_are_joined_by_lines_for_a_template_that_takes_strings() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}, "three"]

    assert render(PLAIN, [{"role": "user", "content": parts}]) == "[user|one\ntwo\nthree]"


def test_strings_become_parts_for_a_template_that_loops_over_them() -> None:
    assert render(PARTS, [{"role": "user", "content": "one"}]) == "[user|<text:one>]"


def test_a_tools_answer_is_one_string_even_for_a_template_that_loops() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]

    assert render(PARTS, [{"role": "tool", "content": parts}]) == "[tool|one\ntwo]"


def test_null_content_is_an_empty_string() -> None:
    assert render(PLAIN, [{"role": "assistant", "content": None}]) == "[assistant|]"


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [('{"a": "é"}', '{"a": "é"}'), ("not json", "{}"), ("[1]", "{}"), ("", "{}"), ({"b": 1}, '{"b": 1}')],
)
def test_a_tool_calls_arguments_are_an_object(arguments: Any, seen: str) -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}

    assert render(source, [{"role": "assistant", "content": None, "tool_calls": [call]}]) == seen


def test_the_clients_messages_are_not_changed() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    before = repr(messages)

    render(PLAIN, messages)

    assert repr(messages) == before


def test_tools_show_the_fields_that_the_engine_keeps_in_its_order() -> None:
    function = {"parameters": {"b": 1, "a": "<é>"}, "name": "f", "extra": 1}

    text = render("{{ tools[0] | tojson }}", tools=[{"function": function, "type": "function", "x": 1}])

    assert text == (
        '{"type": "function", "function": {"name": "f", "description": null, '
        '"parameters": {"b": 1, "a": "<é>"}}}'
    )


def test_the_tool_template_is_used_for_tools() -> None:
    named = {"default": "plain", "tool_use": "tools"}
    tool = {"type": "function", "function": {"name": "f"}}

    assert (render(named), render(named, tools=[tool])) == ("plain", "tools")


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({}, "True//"),
        ({"add_generation_prompt": False}, "False//"),
        ({"chat_template_kwargs": {"enable_thinking": False, "unread": 1}}, "True/False/"),
        ({"reasoning_effort": "none"}, "True/False/none"),
        ({"reasoning_effort": "high"}, "True/True/high"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "True//"),
    ],
)
def test_switches_reach_the_template(fields: dict[str, Any], seen: str) -> None:
    assert (
        render("{{ add_generation_prompt }}/{{ enable_thinking }}/{{ reasoning_effort }}", **fields) == seen
    )


def test_a_developer_is_the_system_where_the_template_does_not_know_the_role() -> None:
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "hi"},
        {"role": "developer", "content": "b"},
    ]

    assert render(PLAIN, messages) == "[system|a\n\nb][user|hi]"
    assert render(PLAIN + "{# 'developer' #}", messages) == "[system|a][user|hi][developer|b]"


def test_the_final_message_is_left_open_where_it_shall_continue() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer is "}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}

    assert render(PLAIN, messages, **fields) == "[user|hi][assistant|The answer is "
    assert (
        render(PLAIN.replace("m.content", "m.content | trim"), messages, **fields)
        == "[user|hi][assistant|The answer is"
    )


def test_templates_use_the_bos_the_date_and_loop_controls() -> None:
    loop = "{% for m in messages %}{{ m.role }}{% break %}{% endfor %}"
    source = "{{ bos_token }}{{ strftime_now('%Y-%m-%d') }}" + loop

    assert render(source, [{"role": "a", "content": ""}, {"role": "b", "content": ""}]) == "<s>2026-03-01a"


def test_marks_for_training_change_nothing() -> None:
    assert render("{% generation %}x{% endgeneration %}y") == "xy"


def test_a_key_named_like_a_method_is_reached_as_a_key_only_in_brackets() -> None:
    message = {"role": "user", "content": "hi"}

    assert (
        render("{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}", [message])
        == "role=user;content=hi;"
    )
    assert render("{{ messages[0]['missing'] }}{{ messages[0].missing is defined }}", [message]) == "False"


def test_what_a_template_refuses_is_told_in_its_words() -> None:
    with pytest.raises(TemplateRefused, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''['__class__'] }}{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ 'x' * 9999999999 }}",
        "{{ 'x'.ljust(9999999999) }}",
        "{{ 'aa'.replace('a', 'b' * 60000000) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ 'x'.join(['y' * 60000000, 'z' * 60000000]) }}",
        "{% for i in range(99999999999) %}x{% endfor %}",
        "{{ namespace(__init__=1) }}",
    ],
)
def test_a_hostile_template_is_stopped(source: str) -> None:
    with pytest.raises(TemplateRefused):
        render(source)


def test_a_requests_own_template_is_not_rendered() -> None:
    with pytest.raises(CannotCount, match="chat_template"):
        render(PLAIN, chat_template="{{ 1 }}")
    with pytest.raises(CannotCount, match="chat_template"):
        render(PLAIN, chat_template_kwargs={"chat_template": "{{ 1 }}"})


@pytest.mark.parametrize("kind", ["input_audio", "video_url", "file", "unheard_of"])
def test_parts_that_the_text_does_not_show_are_not_counted(kind: str) -> None:
    with pytest.raises(CannotCount, match=kind):
        render(PLAIN, [{"role": "user", "content": [{"type": kind}]}])


@pytest.mark.parametrize("messages", [[{"content": "x"}], [{"role": "user", "content": 5}], [7]])
def test_messages_of_an_unexpected_form_are_not_counted(messages: list[Any]) -> None:
    with pytest.raises(CannotCount):
        render(PLAIN, messages)


def test_a_template_that_does_not_compile_is_named_when_it_is_loaded() -> None:
    with pytest.raises(BadTokenizer, match="does not compile"):
        render("{% if %}")


@pytest.mark.parametrize(
    "source", ["{{ messages[0] | tojson }}", "{{ messages[0].content }}{{ messages[0] }}"]
)
def test_a_message_that_is_written_whole_begins_with_its_role(source: str) -> None:
    seen = [
        render(source, [message])
        for message in ({"role": "user", "content": "a"}, {"content": "a", "role": "user"})
    ]

    assert seen[0] == seen[1]


def test_arguments_that_no_parser_takes_are_not_counted() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}

    with pytest.raises(CannotCount):
        render(PLAIN, [{"role": "assistant", "content": None, "tool_calls": [call]}])
