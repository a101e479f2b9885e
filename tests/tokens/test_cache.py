"""Counts are remembered for the very text, within a bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvgate.tokens.cache import ENTRY_BYTES, CountCache


def test_short_and_long_texts_are_found_again() -> None:
    cache = CountCache(100_000)
    for text in ("a", "é" * 200, "x" * 5_000, "x" * 4_999 + "y"):
        cache.put(cache.key(text), len(text))

    assert [cache.get(cache.key(text)) for text in ("a", "é" * 200, "x" * 5_000)] == [1, 200, 5_000]
    assert cache.get(cache.key("unknown")) is None
    assert (cache.hits, cache.misses) == (3, 1)


@given(st.lists(st.text(max_size=300), max_size=300), st.integers(min_value=0, max_value=20_000))
def test_the_bound_of_bytes_holds_whatever_is_put(texts: list[str], bound: int) -> None:
    cache = CountCache(bound)
    for number, text in enumerate(texts):
        cache.put(cache.key(text), number)
        assert cache.bytes_held <= bound
        assert cache.entries * ENTRY_BYTES <= bound


def test_what_is_used_outlives_what_is_not() -> None:
    cache = CountCache(ENTRY_BYTES * 40)
    cache.put("kept", 7)
    for number in range(200):
        cache.put(f"other {number}", number)
        assert cache.get("kept") == 7

    assert cache.get("other 0") is None


def test_after_clearing_nothing_is_known() -> None:
    cache = CountCache(10_000)
    cache.put("a", 1)
    cache.clear()

    assert cache.get("a") is None
    assert (cache.entries, cache.bytes_held) == (0, 0)
