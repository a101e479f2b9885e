"""What can be decided of a request before its prompts are counted.

Promises: a prompt that cannot fit, whatever the rest of the request says, is refused without a count; one
that takes long to count goes on at once where what it takes at most is easily there
(`core.bound_first`), and is corrected when it is counted. Everything else waits for its count.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvgate.core.bound_first import is_easy
from kvgate.core.records import Ask, Granted, Refused
from kvgate.edge import clock
from kvgate.edge.counting.counted import Counted, Prompts
from kvgate.edge.counting.waiting import Waiting
from kvgate.edge.relay.life import Life, OnBound
from kvgate.edge.relay.request import Request
from kvgate.edge.relay.state import State
from kvgate.edge.upstreams.upstream import Upstream
from kvgate.wire.dialects.openai import Shape

if TYPE_CHECKING:
    from kvgate.edge.relay.client import ClientConnection

# Bytes of a body from which on a refusal without a count is thought of: shorter ones are soon counted.
LOOK_FROM = 32_768


class Uncounted(Life):
    """A request whose shape is known and whose prompts are not counted."""

    __slots__ = ("_ask", "_client", "_counted", "_pools", "_request", "_shape")

    _ask: Ask | None
    _client: ClientConnection
    _counted: Counted | None
    _pools: tuple[Upstream, ...]
    _request: Request
    _shape: Shape | None

    def _is_hopeless(self, shape: Shape) -> bool:
        """Refuses a request whose text alone shows that it fits into no pool, however short its answer."""
        counter = self._upstream.counter
        at_best = counter.least_at_best(shape)
        if at_best is None or self._never(shape, at_best) is None:
            return False
        least = counter.least(shape, max(upstream.facts.context for upstream in self._pools))
        refused = None if least is None else self._never(shape, least)
        if refused is None:
            return False
        counter.refused_uncounted += 1
        self._upstream.gate.refused(refused.reason)
        self._refuse(replace(refused, is_least=True, output_cap_that_fits=None))
        return True

    def _never(self, shape: Shape, prompts: Prompts) -> Refused | None:
        """What `prompts` are refused with where no pool can ever have them; None where one may."""
        shown: Refused | None = None
        for upstream in self._pools:
            if not upstream.is_sized:
                return None
            _, ask = self._gateway.choose((upstream,), shape, prompts, self._request.headers)
            shortest = upstream.gate.explain(replace(ask, output_cap=1), clock.now())
            if isinstance(shortest, Granted) or shortest.reason.is_busy:
                return None
            if upstream is self._upstream:
                self._tenant = ask.tenant.name
                given = upstream.gate.explain(ask, clock.now())
                shown = given if isinstance(given, Refused) else None
        return shown

    def _goes_on_bound(self, shape: Shape, waiting: Waiting) -> bool:
        """Lets the request in before its count has come, where that is easy."""
        gateway, gate = self._gateway, self._upstream.gate
        cap = gateway.settings.default_output_cap if shape.effective_cap is None else shape.effective_cap
        # JSON may take twice the bytes of a text: what does not fit like this is not worth a look.
        if cap is None or gate.line or len(shape.body.text) // 2 + cap > gate.facts.context:
            return False
        most = waiting.most()
        if most is None:
            return False
        upstream, ask = gateway.choose(self._pools, shape, most, self._request.headers)
        if not is_easy(upstream.gate, ask):
            return False
        facts, given = upstream.facts, upstream.keeper.at_once(ask)
        if given is None:
            return False
        waiting.is_settling = True
        upstream.counter.admitted_on_bound()
        self._upstream, self._ask, self._tenant = upstream, ask, ask.tenant.name
        self._counted, self._count_source = Counted(most, "bound"), "bound"
        self._bound = OnBound(ask, given, facts)
        self._to(State.COUNTED)
        self._answered(given)
        return True

    # --- what comes after

    def _answered(self, given: Granted | Refused) -> None:
        raise NotImplementedError

    def _refuse(self, refused: Refused, param: str | None = None, *, after: float = 0.0) -> None:
        raise NotImplementedError
