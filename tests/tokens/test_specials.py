"""Texts that spell out special tokens are seen, wherever the token stands, and cheaply."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.tokens.specials import PLACES_MAX, Specials

NAMES = ("<|im_start|>", "<image_soft_token>", "</s>", "[INST]")


@pytest.mark.parametrize("text", ["</s>", "a</s>", "</s>a", "<</s>", "[[INST]", "x <|im_start|>user"])
def test_a_special_token_is_seen_wherever_it_stands(text: str) -> None:
    assert Specials(NAMES).are_in(text)


@pytest.mark.parametrize("text", ["", "a < b", "</S>", "<|im_start|", "[inst]", "image_soft_token"])
def test_what_only_looks_like_one_is_not(text: str) -> None:
    assert not Specials(NAMES).are_in(text)


def test_a_text_full_of_places_to_look_at_is_left_to_others() -> None:
    assert not Specials(NAMES).are_in("< " * (PLACES_MAX - 1))
    assert Specials(NAMES).are_in("< " * (PLACES_MAX + 1))


def test_a_tokenizer_without_special_tokens_has_none_in_any_text() -> None:
    assert not Specials([]).are_in("</s>")


@given(st.text(), st.sampled_from(NAMES), st.text())
def test_none_is_ever_missed(before: str, name: str, after: str) -> None:
    assert Specials(NAMES).are_in(before + name + after)
