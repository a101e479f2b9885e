"""Counts of pieces of text, remembered within a bound of bytes.

Promises: a count comes back only for the very text it was stored for (long texts are known by a
128-bit digest); the least recently used half goes when the bound is reached. Safe to share between
threads: each step is one operation on a dict, and losing a race costs one count, never a wrong one.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

# Up to here the text itself is the key: hashing it costs a tenth of a digest.
TEXT_KEY_MAX = 1_024
# A key of one entry, its hash-table slot and its object headers, measured on CPython.
ENTRY_BYTES = 160


class CountCache:
    """Two generations: what is used moves to the young one, the old one is dropped whole."""

    def __init__(self, max_bytes: int) -> None:
        self._half = max_bytes // 2
        self._young: dict[str | bytes, int] = {}
        self._old: dict[str | bytes, int] = {}
        self._young_bytes = 0
        self._old_bytes = 0
        self.hits = 0
        self.misses = 0

    @property
    def bytes_held(self) -> int:
        return self._young_bytes + self._old_bytes

    @property
    def newest(self) -> Mapping[str | bytes, int]:
        """Short texts, and digests, that were used lately: what `get` looks at first."""
        return self._young

    @property
    def entries(self) -> int:
        return len(self._young) + len(self._old)

    @staticmethod
    def key(text: str) -> str | bytes:
        if len(text) <= TEXT_KEY_MAX:
            return text
        return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()

    def get(self, key: str | bytes) -> int | None:
        count = self._young.get(key)
        if count is None:
            count = self._old.get(key)
            if count is None:
                self.misses += 1
                return None
            self.put(key, count)
        self.hits += 1
        return count

    def put(self, key: str | bytes, count: int) -> None:
        # A character takes up to four bytes in a string with an emoji.
        size = ENTRY_BYTES + (len(key) if isinstance(key, bytes) or key.isascii() else 4 * len(key))
        if self._young_bytes + size > self._half:
            self._old, self._young = self._young, {}
            self._old_bytes, self._young_bytes = self._young_bytes, 0
        if size <= self._half:
            self._young[key] = count
            self._young_bytes += size

    def clear(self) -> None:
        self._young, self._old = {}, {}
        self._young_bytes = self._old_bytes = 0
