"""Whether a text spells out one of the tokenizer's special tokens.

An engine that runs the model from another file may lack some of them (llama.cpp with the text half of
a model for images does), and then counts their letters: more tokens than the tokenizer says. Promise:
False means that none is there; True also means that there are too many places to look at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Looking at one place takes about a microsecond; what is full of them is somebody else's to count.
PLACES_MAX = 1000


class Specials:
    """The special tokens of one tokenizer."""

    __slots__ = ("_contents", "_lengths", "_starts")

    def __init__(self, contents: Iterable[str]) -> None:
        self._contents = frozenset(content for content in contents if content)
        self._lengths = sorted({len(content) for content in self._contents})
        firsts = "".join(sorted({content[0] for content in self._contents}))
        self._starts = re.compile(f"[{re.escape(firsts)}]") if firsts else None

    def are_in(self, text: str) -> bool:
        """Whether `text` may hold one."""
        if self._starts is None:
            return False
        for count, place in enumerate(self._starts.finditer(text)):
            at = place.start()
            if count >= PLACES_MAX or any(text[at : at + n] in self._contents for n in self._lengths):
                return True
        return False
