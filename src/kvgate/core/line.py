"""Who waits for room: first come, first served, bounded in number and in time.

The head of the line is never overtaken, so a large request cannot starve behind small ones.
Joining, leaving and looking are O(log waiting) at most; `expired` is O(waiting) when somebody is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

from kvgate.core.records import Ask, Key, Price, Seconds


@dataclass(frozen=True, slots=True)
class Waiter:
    """A priced request in the line, since when, and until when it will wait."""

    key: Key
    ask: Ask
    price: Price
    since: Seconds
    deadline: Seconds


class Line:
    """Waiters in order of arrival. A dict keeps the order and lets anyone leave in O(1)."""

    __slots__ = ("_deadlines", "_waiters", "blocks", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.blocks = 0
        self._waiters: dict[Key, Waiter] = {}
        # A heap; those who have left stay in it until they come to the top.
        self._deadlines: list[tuple[Seconds, Key]] = []

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._waiters.values())

    @property
    def is_full(self) -> bool:
        return len(self._waiters) >= self.limit

    def join(self, waiter: Waiter) -> None:
        self._waiters[waiter.key] = waiter
        self.blocks += waiter.price.blocks
        heappush(self._deadlines, (waiter.deadline, waiter.key))

    def leave(self, key: Key) -> Waiter | None:
        """Take a waiter out, wherever it stands; None if it is not in the line."""
        waiter = self._waiters.pop(key, None)
        if waiter is not None:
            self.blocks -= waiter.price.blocks
        return waiter

    def head(self) -> Waiter | None:
        return next(iter(self._waiters.values()), None)

    def expired(self, now: Seconds) -> list[Waiter]:
        """Those whose deadline has come, in order of arrival. They are still in the line."""
        earliest = self.next_deadline()
        if earliest is None or earliest > now:
            return []
        return [w for w in self._waiters.values() if w.deadline <= now]

    def next_deadline(self) -> Seconds | None:
        heap = self._deadlines
        while heap and heap[0][1] not in self._waiters:
            heappop(heap)
        return heap[0][0] if heap else None
