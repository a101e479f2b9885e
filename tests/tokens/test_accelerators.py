"""An accelerator is used only where it counts like the reference, and only as long as it does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from kvgate.tokens import PromptCounter
from kvgate.tokens.accelerators import ACCELERATORS, CountText, Load, pick
from kvgate.tokens.loader import load_files


def honest(path: Path, added: Sequence[str]) -> CountText:
    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def absent(path: Path, added: Sequence[str]) -> CountText:
    raise ModuleNotFoundError("not installed")


def broken(path: Path, added: Sequence[str]) -> CountText:
    raise RuntimeError("REFUSED: unknown grammar\nmore")


def wrong_on_emoji(path: Path, added: Sequence[str]) -> CountText:
    count = honest(path, added)
    return lambda text: count(text) + ("🙂" in text)


def wrong_later(path: Path, added: Sequence[str]) -> CountText:
    count = honest(path, added)
    return lambda text: count(text) + ("unheard of" in text)


def counter_with(model: Path, *loaders: tuple[str, Load], recheck_every: int = 1_000) -> PromptCounter:
    return PromptCounter(load_files(model), accelerators=loaders, recheck_every=recheck_every)


def test_the_first_that_agrees_is_taken(model: Path) -> None:
    counter = counter_with(
        model, ("one", absent), ("two", broken), ("three", wrong_on_emoji), ("four", honest)
    )

    assert counter.counted_by == "four"
    assert [(dropped.name, dropped.why) for dropped in counter.dropped] == [
        ("two", "cannot load this tokenizer: REFUSED: unknown grammar"),
        ("three", counter.dropped[1].why),
    ]
    assert "differently" in counter.dropped[1].why


def test_without_one_that_agrees_the_reference_counts(model: Path) -> None:
    assert counter_with(model, ("one", wrong_on_emoji)).counted_by == "tokenizers"


def test_a_difference_while_running_drops_the_accelerator(model: Path) -> None:
    counter = counter_with(model, ("late", wrong_later), recheck_every=1)
    assert counter.counted_by == "late"
    exact = PromptCounter(load_files(model), accelerators=()).count_text("unheard of").prompt_tokens

    assert counter.count_text("unheard of").prompt_tokens == exact
    assert counter.counted_by == "tokenizers"
    assert "while running" in counter.dropped[-1].why


def test_counts_made_before_a_difference_are_forgotten(model: Path) -> None:
    counter = counter_with(model, ("late", wrong_later), recheck_every=3)
    exact = PromptCounter(load_files(model), accelerators=())
    texts = ["unheard of 1", "unheard of 2", "unheard of 3"]
    for text in texts:
        counter.count_text(text)

    assert [counter.count_text(text) for text in texts] == [exact.count_text(text) for text in texts]


def test_every_accelerator_that_is_installed_agrees_or_is_named(model: Path) -> None:
    texts = ["hello", "<|im_start|>user\nhello<|im_end|>", "e\u0301 🙂"]
    for name, load in ACCELERATORS:
        files = load_files(model)
        added = [token.content for token in files.added]
        chosen, dropped = pick([(name, load)], files.path, added, texts, honest(files.path, added))
        assert chosen is None or [chosen.count(text) for text in texts] == [
            honest(files.path, added)(text) for text in texts
        ]
        assert {one.name for one in dropped} <= {name}
