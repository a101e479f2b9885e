"""Who waits for room, bounded in number, in blocks and in time.

The order is `shares`'s. The head of the line gets every block that comes free, except that later ones
which fit in the gap may pass it `passes_max` times. After that nobody passes it (unless it needs more
than is usable at the time): it is let in as soon as enough of what is live has ended. So a large
request waits, once it is the head of its class, at most for `passes_max` others of its class and for
all that was live then.

Joining, leaving and looking cost O(log waiting), and a few steps more to fill a gap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import heappop, heappush

from kvgate.core.accounts import Waiter
from kvgate.core.records import Ask, Key, Seconds
from kvgate.core.shares import Shares

# How often a head may be passed: a few small ones cost a large one little time, and keep the engine
# busy while room for it gathers.
PASSES_MAX = 8


class Line:
    """Those who wait, and whose turn it is."""

    __slots__ = ("_deadlines", "_waiters", "blocks", "blocks_limit", "limit", "passes_max", "shares")

    def __init__(
        self,
        limit: int,
        *,
        blocks_limit: int | None = None,
        floors: Mapping[int, float] | None = None,
        passes_max: int = PASSES_MAX,
    ) -> None:
        self.limit = limit
        self.blocks_limit = blocks_limit
        self.passes_max = passes_max
        self.blocks = 0
        self.shares = Shares(floors)
        self._waiters: dict[Key, Waiter] = {}
        # A heap; those who have left stay in it until they come to the top.
        self._deadlines: list[tuple[Seconds, Key]] = []

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._waiters.values())

    def has_room_for(self, ask: Ask, blocks: int) -> bool:
        """Whether one more may wait.

        A tenant may fill the line only as far as nobody else waits: each has a place for its share
        of the limit by weight, so that a flood of one does not shut the others out.
        """
        number, held = len(self._waiters), self.blocks
        if number < self.limit and (self.blocks_limit is None or held + blocks <= self.blocks_limit):
            return True
        share = self.shares.share_of_line(ask.tenant)
        account = self.shares.account(ask.tenant)
        return len(account.waiting) < int(self.limit * share) and (
            self.blocks_limit is None or account.blocks + blocks <= self.blocks_limit * share
        )

    def may_be_passed(self, waiter: Waiter, usable: int) -> bool:
        """Whether one behind it, or a newcomer, may go first: seldom. But as long as it needs more than is
        `usable`, nothing that ends makes room for it, and nobody waits for that."""
        return waiter.passes < self.passes_max or waiter.blocks > usable

    def passed_by(self, ask: Ask, since: Seconds, usable: int) -> list[Waiter] | None:
        """Whom a newcomer would pass: the first of its own tenant, which may wait for a ceiling, and the head
        of the line, unless it has the right of way before that. None: they have been passed too often."""
        shares = self.shares
        own, head = shares.first_of(ask.tenant), shares.head(usable)
        passed = [own] if own is not None and own.place <= since else []
        if head is not None and head is not own and not shares.outranks(ask.tenant, head, usable):
            passed.append(head)
        if not passed:
            return passed
        may_pass = all(self.may_be_passed(waiter, usable) for waiter in passed)
        return passed if may_pass and shares.is_near(ask.tenant) else None

    def join(self, waiter: Waiter) -> None:
        self._waiters[waiter.key] = waiter
        self.blocks += waiter.blocks
        self.shares.join(waiter)
        heappush(self._deadlines, (waiter.deadline, waiter.key))

    def leave(self, key: Key) -> Waiter | None:
        """Take a waiter out, wherever it stands; None if it is not in the line."""
        waiter = self._waiters.pop(key, None)
        if waiter is not None:
            self.blocks -= waiter.blocks
            self.shares.leave(waiter)
        return waiter

    def take_expired(self, now: Seconds) -> list[Waiter]:
        """Take out those whose deadline has come, by deadline."""
        found = []
        while (earliest := self.next_deadline()) is not None and earliest <= now:
            waiter = self.leave(heappop(self._deadlines)[1])
            assert waiter is not None
            found.append(waiter)
        return found

    def next_deadline(self) -> Seconds | None:
        heap = self._deadlines
        while heap and heap[0][1] not in self._waiters:
            heappop(heap)
        return heap[0][0] if heap else None
