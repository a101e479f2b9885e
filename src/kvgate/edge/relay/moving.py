"""A request that goes to another pool: its engine is gone or cannot count, or another one has room first.

Promises: only while nothing has been sent; what was held at one pool is given back before the next is
asked, and a place in one line is left only by who has got in elsewhere; no engine that failed it is
tried twice.
"""

from __future__ import annotations

from kvgate.core.records import Ask, Ending, Key
from kvgate.edge import clock
from kvgate.edge.counting.counted import Counted
from kvgate.edge.gatekeeper import Gatekeeper
from kvgate.edge.relay.uncounted import Uncounted
from kvgate.edge.upstreams.upstream import Upstream
from kvgate.wire.dialects.openai import Shape


class Moving(Uncounted):
    """A request with several pools that may serve it."""

    __slots__ = ("_line_key", "_waits_since")

    _line_key: Key | None
    _waits_since: float

    def _others(self) -> tuple[Upstream, ...]:
        """Pools that may still be tried, those of the present engine not among them."""
        if len(self._pools) < 2:
            return ()
        here = self._upstream.pool
        return tuple(upstream for upstream in self._pools if upstream.is_up and upstream.pool is not here)

    def _move(self) -> bool:
        """Ask another pool, because this engine cannot be reached; True where there was one to ask.

        Only while nothing has been sent. The reservation here is given back first, and no engine is
        tried twice.
        """
        counted, others = self._counted, self._others()
        if counted is None or not others:
            return False
        key, self._key = self._key, None
        assert key is not None
        self._upstream.keeper.ended(key, Ending.FAILED)
        self._pools = others
        if self._bound is not None:
            # What was easy here need not be easy there, and the count may never come.
            self._count_again(others)
        else:
            self._ask_for_room(counted)
        return True

    def _count_elsewhere(self, why: str) -> None:
        """The engine that was to count cannot; another one of the model may."""
        others = self._others()
        if not others:
            self._refuse_unavailable(why)
            return
        self._count_again(others)

    def _count_again(self, pools: tuple[Upstream, ...]) -> None:
        """Count anew, for other pools."""
        assert self._shape is not None
        if self._counting is not None:
            self._counting.cancel()
        self._bound = self._counting = None
        self._pools, self._upstream = pools, pools[0]
        self._count(self._shape)

    def _goes_to(self, keeper: Gatekeeper) -> bool:
        """Leave the line for another pool that has room; False where it would not let this request in."""
        there = next((upstream for upstream in self._pools if upstream.keeper is keeper), None)
        shape, counted, key, here = self._shape, self._counted, self._line_key, self._upstream
        if there is None or shape is None or counted is None or key is None:
            return False
        if not self._gateway.fleet.is_still(there, here.engine, shape.model):
            return False
        _, ask = self._gateway.choose((there,), shape, counted.prompts, self._request.headers)
        given = keeper.take(ask, self._in_full)
        if given is None:
            return False
        self._wait += clock.now() - self._waits_since
        self._upstream, self._ask = there, ask
        try:
            self._answered(given)
        finally:
            here.keeper.leave(key)
        return True

    # --- what comes after

    def _count(self, shape: Shape) -> None:
        raise NotImplementedError

    def _ask_for_room(self, counted: Counted) -> None:
        raise NotImplementedError

    def _in_full(self, ask: Ask) -> Ask:
        raise NotImplementedError

    def _refuse_unavailable(self, why: str, *, after: float = 0.0) -> None:
        raise NotImplementedError
