"""How many tokens a chat has up to its last turn: a new turn begins with all that went before.

Promises: a count comes back only for the very pieces it was stored for: they are compared, which is ten
times faster than finding each of them. Within a bound of bytes, the least recently used half goes first;
what a longer chat begins with is held once. Safe to share between threads, as the counts of pieces are.
"""

from __future__ import annotations

import sys

from kvgate.tokens.cache import CountCache

# A list of pieces, its place in the table, and each of its strings beyond the characters, on CPython.
ENTRY_BYTES = 400
PIECE_BYTES = 88
# Of all that is remembered about prompts, this part is for the beginnings of chats.
SHARE = 4

Beginning = tuple[list[str], int, int]


class Beginnings:
    """Two generations, as in `CountCache`. Of two chats that look alike from afar, the later is kept."""

    def __init__(self, max_bytes: int) -> None:
        self._half = max_bytes // 2
        self._young: dict[tuple[int, ...], Beginning] = {}
        self._old: dict[tuple[int, ...], Beginning] = {}
        self._young_bytes = 0
        self._old_bytes = 0

    @property
    def bytes_held(self) -> int:
        return self._young_bytes + self._old_bytes

    def take(self, pieces: list[str], end: int) -> int | None:
        """The tokens of `pieces[:end]`, which is forgotten: the caller puts what it has grown to."""
        key = _key(pieces, end)
        found = self._young.get(key) or self._old.get(key)
        if found is None or found[0] != pieces[:end]:
            return None
        # Another thread may have taken it, or put another one there.
        taken = self._young.pop(key, None)
        if taken is not None:
            self._young_bytes -= taken[2]
        return found[1]

    def put(self, pieces: list[str], end: int, tokens: int, text: str) -> None:
        """`text`: of all `pieces`, or of more."""
        # No piece takes more bytes for a character than the whole does.
        size = ENTRY_BYTES + PIECE_BYTES * end + sys.getsizeof(text)
        if size > self._half:
            return
        if self._young_bytes + size > self._half:
            self._old, self._young = self._young, {}
            self._old_bytes, self._young_bytes = self._young_bytes, 0
        key = _key(pieces, end)
        before = self._young.pop(key, None)
        self._young[key] = pieces[:end], tokens, size
        self._young_bytes += size - (before[2] if before else 0)

    def clear(self) -> None:
        self._young, self._old = {}, {}
        self._young_bytes = self._old_bytes = 0


class PromptCache(CountCache):
    """The counts of pieces of text, and of beginnings of chats, within one bound."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes - max_bytes // SHARE)
        self.beginnings = Beginnings(max_bytes // SHARE)

    @property
    def bytes_held(self) -> int:
        return super().bytes_held + self.beginnings.bytes_held

    def clear(self) -> None:
        super().clear()
        self.beginnings.clear()


def _key(pieces: list[str], end: int) -> tuple[int, ...]:
    """What tells most chats apart, in little time: how long they are, and their last messages."""
    return (end, *map(len, pieces[max(0, end - 4) : end]))
