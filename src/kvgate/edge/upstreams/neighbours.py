"""A pool with room takes over who waits for another one.

A request joins the line of one pool. Where another one that may serve it has room first, it goes there.
Promises: whoever is moved is let in at once where it goes; a line gives up its head before those behind
it, and of several lines the one with the higher class at its head, or the longer wait; a pool that could
let in its own takes nobody over, nor does one whose last request failed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from functools import partial

from kvgate.core.accounts import Waiter
from kvgate.edge.upstreams.routing import form_of
from kvgate.edge.upstreams.upstream import Upstream

_log = logging.getLogger("kvgate.upstream")


class Neighbours:
    """The pools of one gateway, where there are several."""

    def __init__(self, upstreams: Sequence[Upstream]) -> None:
        self._upstreams = upstreams
        self._with_room: deque[Upstream] = deque()
        self._is_at_work = False
        self.moved = 0

    def meet(self) -> None:
        """The pools are open, or there are more of them: from now on each tells when it may have room."""
        if len(self._upstreams) > 1:
            for upstream in self._upstreams:
                upstream.keeper.on_room = partial(self.has_room, upstream)

    def has_room(self, upstream: Upstream) -> None:
        """`upstream` may have room for somebody who waits elsewhere. Raises nothing."""
        if not any(other.gate.line for other in self._upstreams if other is not upstream):
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
        except Exception:
            # A defect in one request: it is not that of the one whose end made room.
            _log.exception("a request could not be moved to %s", upstream.label)
        finally:
            self._is_at_work = False
            self._with_room.clear()

    def look(self) -> None:
        """Now and then: room may come without an end, and be left by a move that failed."""
        for upstream in self._upstreams:
            self.has_room(upstream)

    def _takes_over(self, upstream: Upstream) -> bool:
        gate, facts = upstream.gate, upstream.facts
        if upstream.keeper.has_failed or not upstream.is_up or not gate.ledger.fits(1, 1):
            return False
        if gate.line and gate.line.shares.head(facts.usable_blocks) is not None:
            return False
        lines = [(other, _first_of(other)) for other in self._upstreams if other is not upstream]
        lines = [(other, waiters) for other, waiters in lines if waiters]
        lines.sort(key=lambda line: (-line[1][0].ask.tenant.priority, line[1][0].place))
        for other, waiters in lines:
            is_alike = form_of(other.facts) == form_of(facts)
            for waiter in waiters:
                if is_alike and not gate.ledger.fits(waiter.blocks, waiter.seqs):
                    continue
                if other.keeper.move(waiter.key, upstream.keeper):
                    return True
        return False


def _first_of(upstream: Upstream) -> list[Waiter]:
    """Who has the next turn in the line of a pool, a few behind, and who waits for a ceiling there."""
    gate = upstream.gate
    if not gate.line:
        return []
    usable, shares = gate.facts.usable_blocks, gate.line.shares
    head = shares.head(usable)
    waiters = [] if head is None else [head, *shares.behind(head, usable)]
    return waiters + shares.at_ceilings()
