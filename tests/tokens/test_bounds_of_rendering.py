"""A template, or the text in a chat, cannot hang the gate: steps, output and depth have an end."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import pytest

from kvgate.tokens.records import TemplateRefused
from kvgate.tokens.template import ChatTemplate

# Only so that a template that does not end fails here and not in the test runner.
FAR_TOO_LONG = 60.0


def render(source: str, messages: list[dict[str, Any]] | None = None, **fields: Any) -> str:
    template = ChatTemplate(source, {}, lambda: datetime(2026, 1, 2))
    chat = messages or [{"role": "user", "content": "hello"}]
    return template.render({"messages": chat, **fields}).text


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in messages[0].content * 99999 %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
        "{% for a in range(9999) | map('string') %}{% for b in range(9999) | list %}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% for n in messages %}{% for o in messages %}"
        "{% endfor %}{% endfor %}{% endfor %}",
    ],
)
def test_a_rendering_without_end_is_refused(source: str) -> None:
    messages = [{"role": "user", "content": "x"}] * 200
    begin = time.monotonic()

    with pytest.raises(TemplateRefused):
        render(source, messages)

    assert time.monotonic() - begin < FAR_TOO_LONG


def test_a_template_cannot_write_without_end() -> None:
    big = [{"role": "user", "content": "x" * (1 << 20)}]
    source = "{% for a in range(4096) %}{{ messages[0].content }}{% endfor %}"

    with pytest.raises(TemplateRefused, match="characters"):
        render(source, big)


def test_nor_can_it_in_a_few_long_pieces() -> None:
    big = [{"role": "user", "content": "x" * (3 << 19)}]
    source = "{% for a in range(44) %}{{ messages[0].content }}{% endfor %}"

    with pytest.raises(TemplateRefused, match="characters"):
        render(source, big)


def test_a_block_cannot_either() -> None:
    big = [{"role": "user", "content": "x" * (1 << 20)}]
    source = "{% set all %}{% for a in range(99) %}{{ messages[0].content }}{% endfor %}{% endset %}{{ all }}"

    with pytest.raises(TemplateRefused, match="characters"):
        render(source, big)


def test_a_chat_of_many_messages_is_within_the_steps() -> None:
    source = "{% for m in messages %}{{ m.content | trim }}{% if loop.last %}.{% endif %}{% endfor %}"

    text = render(source, [{"role": "user", "content": " x "}] * 20_000)

    assert text == "x" * 20_000 + "."


def test_each_rendering_has_steps_of_its_own() -> None:
    template = ChatTemplate("{% for a in range(90000) %}{% endfor %}ok", {}, lambda: datetime(2026, 1, 2))
    body = {"messages": [{"role": "user", "content": "hello"}]}

    assert {template.render(body).text for _ in range(20)} == {"ok"}


def test_loops_see_the_same_as_without_counting() -> None:
    source = (
        "{% for m in messages[::-1] %}{{ loop.index }}/{{ loop.length }}{{ m.content }}"
        "{{ loop.previtem.content if not loop.first }}{% else %}none{% endfor %}"
        "{% for m in messages | selectattr('role', 'equalto', 'user') %}{{ loop.last }}{% endfor %}"
        "{% for a, b in {'k': 1}.items() %}{{ a }}{{ b }}{% endfor %}{% for c in 'ab' %}{{ c }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]

    assert render(source, messages) == "1/2b2/2abFalseTruek1ab"


@pytest.mark.parametrize(
    "text",
    [
        "{{ 7 * 7 }}{% for a in range(99999999) %}{% endfor %}",
        "{% raw %}{{",
        "{#" * 1_000,
        "\x00\u2028\ufeff{{ self.__class__ }}",
        "{%- endfor -%}",
    ],
)
def test_text_that_looks_like_a_template_is_text(text: str) -> None:
    assert render("[{{ messages[0].content }}]", [{"role": "user", "content": text}]) == f"[{text}]"


def test_deeply_nested_data_is_refused_and_not_fatal() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"deep": deep}}}

    with pytest.raises(TemplateRefused):
        render("{{ tools | tojson }}", tools=[tool])


def test_turns_of_a_recursive_loop_are_counted() -> None:
    source = (
        "{% for a in [0] recursive %}{% if loop.depth < 3 %}{{ loop(range(1000)) }}{% endif %}{% endfor %}"
    )

    with pytest.raises(TemplateRefused, match="steps"):
        render(source)
    assert render(source.replace("1000", "10").replace("endif", "else %}.{% endif")) == "." * 100
