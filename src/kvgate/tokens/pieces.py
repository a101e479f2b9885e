"""Tokens of texts and of rendered chats, counted piece by piece, and remembered.

Promises: the reference's count of the whole text. Text is cut only at special tokens between which counts
add up, as was verified; what counts a piece is the reference, or an accelerator that is compared with
it now and then and not used again after one difference. May be shared by threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvgate.tokens.accelerators import Accelerator, CountText
from kvgate.tokens.beginnings import PromptCache
from kvgate.tokens.cache import TEXT_KEY_MAX, CountCache
from kvgate.tokens.records import Dropped
from kvgate.tokens.separators import cutter, openers
from kvgate.tokens.template import Rendered

# A running check costs one count by the reference; texts above this are not checked again.
RECHECK_MAX = 20_000
# Characters from mark to mark that are remembered as one: looking up a short text costs as much as a long.
RUN_MIN = 128
# Characters of what stands in every message: the name of a role, a line feed.
SHORT = 16
# Chats of fewer characters are counted sooner than their beginning is found; pieces of output in which
# the last turn of a chat stands.
BEGINNING_MIN = 4_096
LOOK_BACK = 12


class PieceCounts:
    """Counts with one tokenizer; `marks` are the special tokens to cut at."""

    def __init__(
        self,
        reference: CountText,
        chosen: Accelerator | None,
        marks: Sequence[str],
        cache_bytes: int,
        recheck_every: int,
    ) -> None:
        self._reference = reference
        self._count: CountText = chosen.count if chosen else reference
        self.counted_by = chosen.name if chosen else "tokenizers"
        self.dropped: list[Dropped] = []
        self.cache = PromptCache(cache_bytes)
        self._cut = cutter(marks)
        self._openers = openers(marks)
        self._recheck_every = recheck_every
        self._until_recheck = recheck_every

    def of_chat(self, rendered: Rendered) -> int:
        """Tokens of a text in the pieces in which its template wrote it: most begin with a mark."""
        if self._cut is None:
            return self.of_text(rendered.text)
        pieces, text, beginnings = rendered.pieces, rendered.text, self.cache.beginnings
        last = len(pieces) - 1
        ends = range(last, max(0, last - LOOK_BACK), -1) if len(text) >= BEGINNING_MIN else ()
        by, begin, tokens, last_mark = self._count, 0, 0, 0
        for end in ends:
            if pieces[end].startswith(self._openers):
                last_mark = last_mark or end
                known = beginnings.take(pieces, end)
                if known is not None:
                    begin, tokens = end, known
                    self.cache.hits += 1
                    break
        if not last_mark:
            return self._runs(pieces)
        # What the next turn will begin with ends where the last piece that begins with a mark begins.
        tokens += self._runs(pieces[begin:last_mark])
        rest = self._runs(pieces[last_mark:])
        if by is self._count:
            beginnings.put(pieces, last_mark, tokens, text)
        return tokens + rest

    def of_text(self, text: str) -> int:
        """Tokens of any text."""
        if self._cut is None:
            return self._piece(text) if text else 0
        pieces = self._cut.split(text)
        total, hits = len(pieces) - 1, 0
        known = self.cache.newest
        for piece in pieces:
            if piece in known:
                # A long text is never a key; most pieces of a chat end here.
                total += known[piece]
                hits += 1
            elif piece:
                total += self._piece(piece)
                known = self.cache.newest
        self.cache.hits += hits
        return total

    def _runs(self, pieces: list[str]) -> int:
        """Tokens of pieces of which the first begins with a mark, or with the text."""
        total, hits, run = 0, 0, ""
        known, opening = self.cache.newest, self._openers
        for piece in pieces:
            if len(run) < RUN_MIN or not piece.startswith(opening):
                run += piece
                continue
            if run in known:
                total += known[run]
                hits += 1
            else:
                total += self._run(run)
                known = self.cache.newest
            run = piece
        self.cache.hits += hits
        return total + (self._run(run) if run else 0)

    def _run(self, text: str) -> int:
        """Tokens from one mark to another: of a message, or of some short ones."""
        if self._cut is None or len(text) > TEXT_KEY_MAX:
            return self.of_text(text)
        known = self.cache.get(text)
        if known is not None:
            return known
        pieces = self._cut.split(text)
        while True:
            by, tokens = self._count, len(pieces) - 1
            for piece in filter(None, pieces):
                # What is repeated in every message is remembered by itself as well.
                tokens += self._piece(piece) if len(piece) < SHORT else self._counted(piece)
            if by is self._count:
                self.cache.put(text, tokens)
                return tokens

    def _piece(self, text: str) -> int:
        key = text if len(text) <= TEXT_KEY_MAX else CountCache.key(text)
        known = self.cache.get(key)
        if known is not None:
            return known
        by, count = self._count, self._counted(text)
        if by is self._count:
            self.cache.put(key, count)
        return count

    def _counted(self, text: str) -> int:
        count = self._count(text)
        self._until_recheck -= 1
        if self._until_recheck <= 0 and len(text) <= RECHECK_MAX:
            self._until_recheck = self._recheck_every
            count = self._rechecked(text, count)
        return count

    def _rechecked(self, text: str, count: int) -> int:
        """The reference's count; an accelerator that differs is not used again."""
        truth = self._reference(text)
        if truth != count and self.counted_by != "tokenizers":
            self.dropped.append(Dropped(self.counted_by, f"while running: counted {count} for {truth}"))
            self._count, self.counted_by = self._reference, "tokenizers"
            self.cache.clear()
        return truth


def counts_add_up(reference: CountText, marks: Sequence[str], texts: Sequence[str]) -> bool:
    """Whether cutting at `marks` leaves every count as it is, between all kinds of neighbours."""
    cut = cutter(marks)
    if cut is None:
        return False
    for index, text in enumerate(texts):
        mark, other = marks[index % len(marks)], marks[index // len(marks) % len(marks)]
        whole = f"{text}{mark}{texts[-1 - index]}{other}{text}"
        pieces = cut.split(whole)
        if len(pieces) - 1 + sum(map(reference, pieces)) != reference(whole):
            return False
    return True
