"""Which pools may serve a request, and which of them gets it.

Promises: a request goes only to an engine that serves its model; among pools it goes where it fits
now and leaves the largest share free, else where it will probably be let in first; what was counted
by one kind of engine is not believed of another kind. Nothing here reserves or waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from hashlib import blake2b

from kvgate.core.price import price, worst_case_blocks
from kvgate.core.records import Ask, Granted, PoolFacts, Reason, Seconds
from kvgate.edge.upstreams import models
from kvgate.edge.upstreams.upstream import Upstream
from kvgate.wire.dialects.openai import Shape
from kvgate.wire.engines import Engine
from kvgate.wire.routes import FREE_METHODS, Route

# SGLang takes a rank in the body as well; the gate's header decides.
RANK_FIELDS = ("data_parallel_rank", "routed_dp_rank")


class NotServed(Exception):
    """No pool is there for a request; `reason` is what the client is told."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Fleet:
    """The pools by the names of their models.

    A group is made of pools that share a name, also by way of others. While there is one group, and
    the operator has listed no names, any name goes to it: the engine knows best what it serves.
    """

    def __init__(self, upstreams: Sequence[Upstream]) -> None:
        self.upstreams = tuple(upstreams)
        self.groups: list[tuple[Upstream, ...]] = []
        self._by_name: dict[str, tuple[Upstream, ...]] = {}
        self.regroup()

    def regroup(self) -> None:
        """The models have been read (again)."""
        by_name: dict[str, list[Upstream]] = {}
        groups: list[list[Upstream]] = []
        for upstream in self.upstreams:
            names = upstream.models or frozenset()
            joined = [g for g in groups if any(names & (u.models or frozenset()) for u in g)]
            # The ranks of one engine are always together.
            joined = joined or [g for g in groups if any(u.given is upstream.given for u in g)]
            groups = [g for g in groups if g not in joined]
            groups.append([*(u for g in joined for u in g), upstream])
            for name in names:
                by_name.setdefault(name, []).append(upstream)
        order = {upstream: number for number, upstream in enumerate(self.upstreams)}
        self.groups = sorted((tuple(g) for g in groups), key=lambda g: min(order[u] for u in g))
        self._by_name = {name: tuple(found) for name, found in by_name.items()}
        self.is_strict = len(groups) > 1 or any(u.given.models for u in self.upstreams)
        # The only pool, where every request goes to it as it came.
        alone = len(self.upstreams) == 1 and not self.is_strict and not self.upstreams[0].aliases
        self.only = self.upstreams[0] if alone else None

    def serving(self, model: str | None) -> tuple[Upstream, ...]:
        """The pools that serve `model` (None: the request names none). Raises `NotServed`."""
        found = self._by_name.get(model) if model is not None else None
        if found is not None:
            return found
        if not self.is_strict:
            return self.upstreams
        unread = [upstream.label for upstream in self.upstreams if upstream.models is None]
        if model is None:
            known = [group for group in self.groups if any(u.models is not None for u in group)]
            if len(known) == 1:
                return known[0]
            if known:
                detail = f"Say which model: there are several. {self._names_shown()}"
                raise NotServed(Reason.INVALID_REQUEST, detail)
        if unread or model is None:
            raise NotServed(
                Reason.ENGINE_UNAVAILABLE, f"It is not known yet which models {' and '.join(unread)} serve."
            )
        raise NotServed(
            Reason.MODEL_NOT_FOUND, f"The model {model[:100]!r} does not exist. {self._names_shown()}"
        )

    def is_still(self, upstream: Upstream, engine: Engine, target: str | None) -> bool:
        """Whether a pool that served a request when it came, as the `engine` that counted it and under the
        name `target`, does so now."""
        if upstream.engine is not engine:
            return False
        return not self.is_strict or target is None or target in (upstream.models or ())

    def route_for(self, method: bytes, path: bytes) -> Route | None:
        """The priced endpoint of a request at the first engine that has it, or None."""
        if method != b"POST":
            return None
        for upstream in self.upstreams:
            route = upstream.engine.routes.get(path)
            if route is not None:
                return route
        return None

    def read(self, route: Route, path: bytes, body: bytes) -> tuple[Shape, Route, tuple[Upstream, ...]]:
        """What is asked for, and the pools that may serve it, the one that counts it first; the route
        and the shape are those of its engine. Raises `BadBody` or `NotServed`."""
        shape = route.read(body)
        if self.only is not None:
            return shape, route, self.upstreams
        pools = kin(self.serving(shape.model), path, shape.model)
        if not pools:
            raise NotServed(
                Reason.UNPRICED_ENDPOINT,
                f"{path.decode('ascii', 'replace')[:200]} is not served by an engine with this model.",
            )
        first = first_up(pools)
        target = first.target(shape.model)
        own = first.engine.routes[path]
        changes: dict[str, object] = {} if target == shape.model else {"model": target}
        if first.rank is not None:
            changes |= {name: None for name in RANK_FIELDS if name in shape.body.fields}
        if changes:
            shape = own.read(shape.body.replaced(changes))
        elif own is not route:
            shape = own.read(body)
        return shape, own, pools

    def unpriced(self, method: bytes, path: bytes, body: bytes, *, is_allowed: bool) -> Upstream | None:
        """Where a request without a price goes; None where it might generate there.

        Raises `NotServed`. A GET goes to the first engine that can be reached.
        """
        if method in FREE_METHODS:
            return first_up(self.upstreams)
        pools: tuple[Upstream, ...] = self.upstreams
        if not is_allowed:
            pools = tuple(u for u in pools if path in u.engine.free_posts)
            if not pools:
                return None
        if self.only is None:
            named = self.serving(models.named_in(body))
            pools = tuple(u for u in pools if u in named)
        return first_up(pools) if pools else None

    def models_page(self) -> bytes | None:
        """Our own answer to GET /v1/models; None where the only engine's is the better one."""
        return None if self.only is not None else models.merged(self.upstreams)

    def _names_shown(self) -> str:
        names = sorted(self._by_name)
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        return f"There are {', '.join(names[:8])}{more}."


def first_up(upstreams: Sequence[Upstream]) -> Upstream:
    """The first that can be reached, or the first: to try it is how its return is noticed."""
    for upstream in upstreams:
        if upstream.is_up:
            return upstream
    return upstreams[0]


def kin(upstreams: Sequence[Upstream], path: bytes, model: str | None) -> tuple[Upstream, ...]:
    """Those that serve `path`, count alike and know the model by the same name; reachable ones before
    others. Empty where none serves the path."""
    fit = [upstream for upstream in upstreams if path in upstream.engine.routes]
    if len(fit) < 2:
        return tuple(fit)
    first = first_up(fit)
    alike = (first.engine, first.target(model))
    return tuple(u for u in fit if (u.engine, u.target(model)) == alike)


def choose(
    upstreams: Sequence[Upstream], ask_of: Callable[[Upstream], Ask], session: bytes | None, now: Seconds
) -> tuple[Upstream, Ask]:
    """The pool that a request should ask, and its question there.

    `session`: requests with the same one stay with the same pool while they fit into it.
    """
    up = [upstream for upstream in upstreams if upstream.is_up]
    if len(up) < 2:
        upstream = up[0] if up else next((u for u in upstreams if u.is_sized), upstreams[0])
        return upstream, ask_of(upstream)
    order = _by_headroom(up, ask_of)
    if session is not None:
        home = max(up, key=lambda upstream: _affinity(session, upstream.label))
        order = [home, *(upstream for upstream in order if upstream is not home)]
    for upstream in order:
        ask = ask_of(upstream)
        if isinstance(upstream.gate.explain(ask, now), Granted):
            return upstream, ask
    asks = [(upstream, ask_of(upstream)) for upstream in up]
    return min(asks, key=lambda each: _wait(each[0], each[1], now))


def _by_headroom(upstreams: Sequence[Upstream], ask_of: Callable[[Upstream], Ask]) -> list[Upstream]:
    """Those with room for the request, the largest share left free first.

    Priced once for pools of the same form: with many replicas, that is most of the work.
    """
    blocks: dict[tuple[object, ...], int] = {}
    found = []
    for upstream in upstreams:
        facts = upstream.facts
        form = form_of(facts)
        needed = blocks.get(form)
        if needed is None:
            needed = blocks[form] = worst_case_blocks(ask_of(upstream), facts)[0]
        left = upstream.gate.ledger.free_blocks - needed
        if left >= 0:
            found.append((left / facts.usable_blocks, upstream))
    found.sort(key=lambda each: each[0], reverse=True)
    return [upstream for _, upstream in found]


def form_of(facts: PoolFacts) -> tuple[object, ...]:
    """Pools of one form price a request alike."""
    return facts.block_size, facts.context, facts.engine_context, facts.lookahead, id(facts.geometry)


def _affinity(session: bytes, label: str) -> bytes:
    """Rendezvous hashing: a pool that goes or comes moves only the sessions that it has or gets."""
    return blake2b(session + b"\0" + label.encode(), digest_size=8).digest()


def _wait(upstream: Upstream, ask: Ask, now: Seconds) -> tuple[Seconds, float]:
    """When it will probably be let in, and how full the pool is; never comes last."""
    gate, facts = upstream.gate, upstream.facts
    full = 1 - gate.ledger.free_blocks / max(1, facts.usable_blocks)
    priced = price(ask, facts)
    if isinstance(priced, Reason):
        # The answer names the largest size that could be had.
        return math.inf, -facts.usable_blocks * facts.block_size
    before = int(gate.line.shares.blocks_before(ask.tenant))
    return gate.forecast.room_in(before + priced.blocks - gate.ledger.headroom, now), full
