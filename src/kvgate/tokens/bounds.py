"""Bounds on the tokens of a text from its length alone, at the cost of reading the length.

Promises: `least(text) <= tokens <= most(text)` for tokenizers that fall back to bytes (byte-level
BPE, or BPE with `byte_fallback`) and whose normalizer grows a text by a known factor at most; there
are no bounds for others. Nothing is looked up in the text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Room for what a tokenizer writes around a text: a leading mark, BOS, EOS.
AROUND = 4


@dataclass(frozen=True, slots=True)
class Bounds:
    """`longest`: UTF-8 bytes of the longest token. `growth`: bytes that the normalizer makes of one."""

    longest: int
    growth: int

    def least(self, text: str) -> int:
        """No token covers more than `longest` bytes, so that many tokens are needed at least."""
        # Characters are at most bytes, and a normalizer that composes shortens: at most threefold.
        return math.ceil(len(text) / (self.longest * self.growth))

    def most(self, text: str) -> int:
        """At most one token for each byte, after the normalizer."""
        if text.isascii():
            return len(text) + AROUND
        return len(text.encode("utf-8", "surrogatepass")) * self.growth + AROUND
