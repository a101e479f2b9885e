"""Cuts are made only where no other added token can reach over the cut."""

from __future__ import annotations

from kvgate.tokens.separators import AddedToken, cutter, separators


def exact(*contents: str) -> list[AddedToken]:
    return [AddedToken(content, True) for content in contents]


def test_only_what_the_template_writes_is_a_separator() -> None:
    assert separators(exact("<|a|>", "<|b|>"), "x<|a|>y") == ("<|a|>",)


def test_tokens_that_are_not_exact_are_not_separators() -> None:
    assert separators([AddedToken("<|a|>", False)], "<|a|>") == ()


def test_a_token_inside_another_is_not_a_separator() -> None:
    assert separators(exact("<|a|>", "<|a|>\n"), "<|a|>") == ()


def test_a_token_whose_beginning_ends_another_is_not_a_separator() -> None:
    assert separators(exact("<|a|>", "!<|"), "<|a|>") == ()


def test_the_cutter_finds_all_of_them() -> None:
    cut = cutter(("<|a|>", "<b>"))
    assert cut is not None
    assert cut.split("1<|a|>2<b>3") == ["1", "2", "3"]
    assert cutter(()) is None
