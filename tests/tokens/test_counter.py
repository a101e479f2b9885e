"""Counts of chats and texts equal the reference tokenizer's on the rendered text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import SPECIALS, write_model
from tokenizers import Tokenizer
from traffic import requests

from kvgate.tokens import CannotCount, PromptCounter
from kvgate.tokens.loader import load_files

SEED = 20_260_711


@pytest.fixture(scope="module")
def counter(model: Path) -> PromptCounter:
    return PromptCounter(load_files(model), accelerators=())


@pytest.fixture(scope="module")
def reference(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def whole(model: Path, reference: Tokenizer, body: dict[str, Any]) -> int:
    """The count without cutting and without a cache."""
    template = load_files(model).template
    assert template is not None
    return len(reference.encode(template.render(body).text, add_special_tokens=False).ids)


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)], **fields}


def test_a_chat_counts_as_its_rendered_text_does(
    model: Path, counter: PromptCounter, reference: Tokenizer
) -> None:
    body = chat("hello world", "the fox", "and you?")

    assert counter.count_chat(body).prompt_tokens == whole(model, reference, body)


def test_mixed_requests_count_like_the_reference(
    model: Path, counter: PromptCounter, reference: Tokenizer
) -> None:
    template = load_files(model).template
    assert template is not None
    for number, body in enumerate(requests(SEED, 150, [*SPECIALS, "<tool_call>"], roles_alternate=False)):
        expected = len(reference.encode(template.render(body).text, add_special_tokens=False).ids)
        assert counter.count_chat(body).prompt_tokens == expected, f"seed {SEED}, request {number}"


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.one_of(st.sampled_from([*SPECIALS, "<tool_call>", "<|im_", " ", "\n"]), st.text()), max_size=8
    )
)
def test_cutting_at_special_tokens_changes_no_count(pieces: list[str]) -> None:
    text = "".join(pieces)
    counter, reference = shared()
    try:
        expected = len(reference.encode(text, add_special_tokens=False).ids)
    except (UnicodeError, TypeError):
        with pytest.raises(CannotCount):
            counter.count_text(text, add_special=False)
        return

    assert counter.count_text(text, add_special=False).prompt_tokens == expected
    most, words = counter.proofs.most(text), counter.proofs.words
    assert most is not None
    assert words is not None
    assert words.least(text, 1_000_000) <= expected <= most


SHARED: list[tuple[PromptCounter, Tokenizer]] = []


def shared() -> tuple[PromptCounter, Tokenizer]:
    return SHARED[0]


@pytest.fixture(scope="module", autouse=True)
def _share(counter: PromptCounter, reference: Tokenizer) -> None:
    SHARED[:] = [(counter, reference)]


def test_the_chat_is_cut_at_the_templates_special_tokens(counter: PromptCounter) -> None:
    assert set(counter.separators) == {"<|bos|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"}


def test_a_new_turn_counts_only_what_is_new(model: Path) -> None:
    counter = PromptCounter(load_files(model), accelerators=())
    old = ["hello " * 50, "the lazy dog " * 50, "and you?"]
    counter.count_chat(chat(*old))
    before = counter.cache.misses

    counter.count_chat(chat(*old, "a quick answer", "next question"))

    assert counter.cache.misses - before == 2


def test_special_tokens_in_a_users_text_count_as_special_tokens(counter: PromptCounter) -> None:
    plain = counter.count_chat(chat("ab")).prompt_tokens
    injected = counter.count_chat(chat("a<|im_end|>b")).prompt_tokens

    assert injected <= plain + 2


def test_tools_are_part_of_the_count(counter: PromptCounter) -> None:
    tool = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}

    assert (
        counter.count_chat(chat("hello", tools=[tool])).prompt_tokens
        > counter.count_chat(chat("hello")).prompt_tokens + 10
    )


def test_parts_add_up_to_the_whole(counter: PromptCounter) -> None:
    tool = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
    body = {
        "tools": [tool],
        "messages": [
            {"role": "system", "content": "be quick"},
            {"role": "user", "content": "hello world"},
            {"role": "assistant", "content": "the fox"},
            {"role": "user", "content": "hello world"},
        ],
    }

    count = counter.count_chat(body, with_parts=True)

    parts = {part.name: part.tokens for part in count.parts}
    assert sum(parts.values()) == count.prompt_tokens
    assert set(parts) == {"tools", "system", "messages[1]", "messages[2]", "messages[3]", "template"}
    assert parts["messages[1]"] == parts["messages[3]"] > 0


def test_a_chat_gets_bos_once_where_the_engine_adds_it(model: Path, tmp_path: Path) -> None:
    without = write_model(tmp_path, template="{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}")
    body = chat("hello")

    def count(folder: Path, adds: bool) -> int:
        return (
            PromptCounter(load_files(folder), accelerators=(), chat_adds_bos=adds)
            .count_chat(body)
            .prompt_tokens
        )

    assert count(without, adds=True) == count(without, adds=False) + 1
    assert count(model, adds=True) == count(model, adds=False)


def test_a_bos_that_engines_disagree_on_is_counted_and_marked(tmp_path: Path) -> None:
    counter = PromptCounter(
        load_files(write_model(tmp_path, config={"add_bos_token": True})), accelerators=()
    )

    with_bos, without = counter.count_text("hello"), counter.count_text("hello", add_special=False)

    assert (with_bos.prompt_tokens, with_bos.is_exact) == (without.prompt_tokens + 1, False)
    assert without.is_exact


def test_without_a_template_chats_are_left_to_the_engine(tmp_path: Path) -> None:
    counter = PromptCounter(load_files(write_model(tmp_path, template=None)), accelerators=())

    with pytest.raises(CannotCount, match="no chat template"):
        counter.count_chat(chat("hello"))
    assert counter.count_text("hello").prompt_tokens > 0


def test_half_a_surrogate_pair_is_not_counted(counter: PromptCounter) -> None:
    with pytest.raises(CannotCount, match="surrogate"):
        counter.count_chat(chat("bad \ud800 text"))


def test_an_image_needs_a_rule_or_a_stated_bound(model: Path) -> None:
    part = {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}
    body = {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]}

    with pytest.raises(CannotCount, match="image"):
        PromptCounter(load_files(model), accelerators=()).count_chat(body)
    bounded = PromptCounter(load_files(model), accelerators=(), image_tokens=700).count_chat(
        body, with_parts=True
    )

    assert not bounded.is_exact
    assert bounded.source == "bound"
    assert bounded.prompt_tokens > 700
    assert sum(part.tokens for part in bounded.parts) == bounded.prompt_tokens


def test_large_bodies_are_named_as_long(counter: PromptCounter) -> None:
    assert not counter.is_long(500)
    assert counter.is_long(1_000_000)


@pytest.mark.parametrize(
    "written",
    [
        "{% filter e %}{{ message.content }}{% endfilter %}",
        "{% filter safe %}{{ message.content }}{% endfilter %}",
        "{% autoescape true %}{{ message.content }}{% endautoescape %}",
        "{% macro f() %}{{ caller() }}{% endmacro %}{% call f() %}{{ message.content }}{% endcall %}",
    ],
)
def test_markup_among_what_a_template_writes_changes_no_count(tmp_path: Path, written: str) -> None:
    template = "{% for message in messages %}" + written + "<|im_end|>\n& <b>{% endfor %}"
    files = load_files(write_model(tmp_path, template))
    counter = PromptCounter(files, accelerators=())
    body = {"messages": [{"role": "user", "content": "a < b & c"}] * 3}
    assert files.template is not None
    text = files.template.render(body).text

    assert counter.count_chat(body).prompt_tokens == len(
        files.reference.encode(text, add_special_tokens=False)
    )
