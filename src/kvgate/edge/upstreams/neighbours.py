"""A pool with room takes over who waits for another one.

A request joins the line of one pool. Where another one that may serve it has room first, it goes there.
Promises: whoever is moved is let in at once where it goes; a line gives up its head before those behind
it, and of several lines the one whose head has waited longest is asked first; a pool takes nobody over
while somebody waits for itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

from kvgate.core.accounts import Waiter
from kvgate.edge.upstreams.upstream import Upstream


class Neighbours:
    """The pools of one gateway, where there are several."""

    def __init__(self, upstreams: Sequence[Upstream]) -> None:
        self._upstreams = upstreams
        self._with_room: deque[Upstream] = deque()
        self._is_at_work = False
        self.moved = 0

    def meet(self) -> None:
        """The pools are open, or there are more of them: from now on each tells when nobody waits for it."""
        if len(self._upstreams) > 1:
            for upstream in self._upstreams:
                upstream.keeper.on_room = partial(self.has_room, upstream)

    def has_room(self, upstream: Upstream) -> None:
        """`upstream` may have room for somebody who waits elsewhere."""
        if not any(other.gate.line for other in self._upstreams):
            return
        self._with_room.append(upstream)
        if self._is_at_work:
            return  # somebody is being moved, and what that makes room for comes next
        self._is_at_work = True
        try:
            while self._with_room:
                upstream = self._with_room.popleft()
                while self._takes_over(upstream):
                    self.moved += 1
        finally:
            self._is_at_work = False
            self._with_room.clear()

    def _takes_over(self, upstream: Upstream) -> bool:
        gate = upstream.gate
        if gate.line or not upstream.is_up or not gate.ledger.fits(1, 1):
            return False
        lines = [list(_first_of(other)) for other in self._upstreams if other is not upstream]
        for line in sorted([line for line in lines if line], key=lambda line: line[0][1].place):
            if any(other.keeper.move(waiter.key, upstream.keeper) for other, waiter in line):
                return True
        return False


def _first_of(upstream: Upstream) -> Iterator[tuple[Upstream, Waiter]]:
    """Who has the next turn in the line of a pool, a few behind, and who waits for a ceiling there."""
    gate = upstream.gate
    if not gate.line:
        return
    usable, shares = gate.facts.usable_blocks, gate.line.shares
    head = shares.head(usable)
    waiters = [] if head is None else [head, *shares.behind(head, usable)]
    for waiter in waiters + shares.at_ceilings():
        yield upstream, waiter
