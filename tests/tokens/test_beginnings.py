"""A chat that has grown by a turn counts like one that was never seen."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import SPECIALS, write_model

from kvgate.tokens import PromptCounter
from kvgate.tokens.accelerators import Accelerator
from kvgate.tokens.beginnings import Beginnings, PromptCache
from kvgate.tokens.cache import CountCache
from kvgate.tokens.loader import load_files
from kvgate.tokens.pieces import BEGINNING_MIN, LOOK_BACK, PieceCounts
from kvgate.tokens.separators import openers
from kvgate.tokens.template import Rendered

SEED = 3
TURNS = 12
MARKS = ("<|im_start|>", "<|im_end|>")


def chat(texts: list[str]) -> dict[str, object]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}


def rendered(pieces: list[str]) -> Rendered:
    return Rendered("".join(pieces), pieces, [], None, [])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def test_each_turn_of_a_growing_chat_counts_like_the_whole(model: Path) -> None:
    random = Random(SEED)
    files = load_files(model)
    counter = PromptCounter(files, accelerators=())
    letters = "abc \n<|im_end|>é🙂"
    texts = ["".join(random.choices(letters, k=random.choice((3, 300, 1_500)))) for _ in range(2 * TURNS)]
    # Changed in the middle, cut short, and with another end: what went before may not be believed.
    chats = [texts[:n] for n in range(1, len(texts))]
    chats += [[*texts[:5], "x", *texts[6:]], texts[:9], [*texts[:9], "other"], texts]

    for one in chats:
        whole = files.template.render(chat(one)).text if files.template else ""
        exact = len(files.reference.encode(whole, add_special_tokens=False))
        assert [counter.count_chat(chat(one)).prompt_tokens for _ in range(2)] == [exact, exact]
    assert counter.cache.bytes_held > BEGINNING_MIN


def test_a_new_turn_counts_only_what_is_new() -> None:
    seen: list[str] = []

    def count(text: str) -> int:
        seen.append(text)
        return len(text)

    counts = PieceCounts(count, None, MARKS, 1 << 20, 10**9)
    turns = [f"<|im_start|>user\n{number} {'x' * 2_000}<|im_end|>\n" for number in range(10)]
    opening = "<|im_start|>assistant\n"
    counts.of_chat(rendered([*turns, opening]))
    CountCache.clear(counts.cache)  # so that only the beginning is known
    seen.clear()

    tokens = counts.of_chat(
        rendered([*turns, f"{opening}an answer<|im_end|>\n", "<|im_start|>user\nmore", opening])
    )

    assert tokens == PieceCounts(len, None, MARKS, 0, 10**9).of_text(
        "".join([*turns, f"{opening}an answer<|im_end|>\n", "<|im_start|>user\nmore", opening])
    )
    assert seen
    assert not [text for text in seen if "xx" in text]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.lists(
            st.sampled_from([*SPECIALS, "<tool_call>", "<|im_", "a" * 150, "b\n", "é🙂" * 800, " "]),
            max_size=4,
        ),
        max_size=LOOK_BACK + 4,
    ),
    st.lists(st.sampled_from(["<|im_start|>x", "y" * 30, "<|im_end|>"]), max_size=4),
)
def test_pieces_of_any_kind_count_like_their_text(pieces: list[list[str]], more: list[str]) -> None:
    counts, plain = shared()
    first = ["".join(piece) for piece in pieces]
    for one in (first, [*first, *more], first):
        text = "".join(one)
        assert counts.of_chat(rendered(one)) == plain(text)


@cache
def shared() -> tuple[PieceCounts, Callable[[str], int]]:
    """One for all examples, so that they meet each other's memories."""
    with tempfile.TemporaryDirectory() as folder:
        reference = load_files(write_model(Path(folder))).reference

    def count(text: str) -> int:
        return len(reference.encode(text, add_special_tokens=False))

    return PieceCounts(count, None, ("<|im_start|>", "<|im_end|>", "<tool_call>"), 1 << 20, 1), count


def test_nothing_is_remembered_that_a_dropped_accelerator_counted() -> None:
    def wrong(text: str) -> int:
        return len(text) + ("late" in text)

    chosen = Accelerator("wrong", wrong)
    counts = PieceCounts(len, chosen, MARKS, 1 << 20, 4)
    turns = [f"<|im_start|>user\n{number} late {'x' * 900}<|im_end|>\n" for number in range(10)]
    pieces = [*turns, "<|im_start|>assistant\n"]

    counts.of_chat(rendered(pieces))

    assert counts.counted_by == "tokenizers"
    assert counts.of_chat(rendered(pieces)) == PieceCounts(len, None, MARKS, 0, 10**9).of_chat(
        rendered(pieces)
    )


def test_a_beginning_is_known_for_its_very_pieces() -> None:
    beginnings = Beginnings(100_000)
    pieces = ["aa", "bb", "cc", "dd", "ee", "tail"]
    beginnings.put(pieces, 5, 7, "".join(pieces))

    assert beginnings.take(["xx", *pieces[1:]], 5) is None
    assert beginnings.take(pieces, 4) is None
    assert beginnings.take([*pieces[:5], "other tail"], 5) == 7
    assert (beginnings.take(pieces, 5), beginnings.bytes_held) == (None, 0)


@given(st.lists(st.text(max_size=200), min_size=1, max_size=200), st.integers(0, 20_000))
def test_the_bound_of_bytes_holds_for_beginnings(texts: list[str], bound: int) -> None:
    kept = PromptCache(bound)
    for number, text in enumerate(texts):
        kept.beginnings.put([text, text[:5]], 1 + number % 2, number, text * 2)
        kept.put(kept.key(text), number)
        assert kept.bytes_held <= bound
    kept.clear()
    assert kept.bytes_held == 0


def test_a_mark_that_can_begin_within_itself_opens_nothing() -> None:
    assert openers(("<|a|>", "aXa", "|||", " <b>", "<b> ")) == ("<|a|>",)


def test_nor_what_it_counted_while_another_thread_dropped_it() -> None:
    def count(text: str) -> int:
        counts._count = len  # as `_rechecked` does there
        counts.cache.clear()
        return len(text) - 1

    counts = PieceCounts(len, Accelerator("wrong", count), MARKS, 1 << 20, 10**9)
    counts.of_text("late")

    assert counts.of_text("late") == 4


class Shared(dict[tuple[int, ...], tuple[list[str], int, int]]):
    """Whatever one thread has seen in it, another takes before anything is done about it."""

    beginnings: Beginnings

    def get(self, key: tuple[int, ...], default: Any = None) -> Any:
        found = super().get(key, default)
        if self.pop(key, None) is not None:
            self.beginnings._young_bytes -= found[2]
        return found


def test_threads_that_meet_lose_no_bytes() -> None:
    beginnings = Beginnings(100_000)
    beginnings._young = young = Shared()
    young.beginnings = beginnings
    pieces = ["aa", "bb", "tail"]
    for _ in range(5):
        beginnings.put(pieces, 2, 7, "".join(pieces))
        assert beginnings.bytes_held == sum(size for _, _, size in young.values()) > 0


def test_short_pieces_of_any_letters_are_within_what_is_counted_for_them() -> None:
    beginnings = Beginnings(1 << 20)
    pieces = [chr(0x4E00 + number) for number in range(1_000)]
    beginnings.put(pieces, 1_000, 1_000, "".join(pieces))

    assert sys.getsizeof(pieces[:1_000]) + sum(map(sys.getsizeof, pieces)) <= beginnings.bytes_held
