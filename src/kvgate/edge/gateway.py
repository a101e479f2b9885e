"""The gateway: the engines' pools, the clients' connections, and what belongs to all requests.

`start` listens; `stop` refuses newcomers, lets streams finish for a while, then ends them. The admin
server and the telemetry read `snapshot`; nothing here writes to a log or serves metrics itself.
`upstream`, `routing`, `listening`, `housekeeping` and `reload` are the parts that would hide this one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvgate import __version__
from kvgate.config import Settings
from kvgate.core.gate import Gate
from kvgate.core.policy import Policy, worst_case
from kvgate.core.price import requested_cap
from kvgate.core.records import Ask, PoolFacts
from kvgate.core.tenancy import both
from kvgate.edge import clock, reload
from kvgate.edge.compiled import is_compiled
from kvgate.edge.counting.counter import Counter
from kvgate.edge.explain import explain_request
from kvgate.edge.gatekeeper import Gatekeeper
from kvgate.edge.housekeeping import keep_house, keep_known, keep_watch, probe
from kvgate.edge.listening import Listener
from kvgate.edge.observing.collector import Collector
from kvgate.edge.observing.loop_lag import LoopLag
from kvgate.edge.observing.status import snapshot
from kvgate.edge.relay.body_memory import BodyMemory
from kvgate.edge.relay.client import ClientConnection
from kvgate.edge.relay.finished import Finished
from kvgate.edge.relay.heads import Headers
from kvgate.edge.relay.pool import EnginePool
from kvgate.edge.relay.upstream import Upstream as Address
from kvgate.edge.tenants import read_keys
from kvgate.edge.tls import engine_context, listening_context
from kvgate.edge.upstreams import routing, sizing
from kvgate.edge.upstreams.neighbours import Neighbours
from kvgate.edge.upstreams.upstream import Upstream, upstreams_of
from kvgate.wire.dialects.openai import Shape
from kvgate.wire.dialects.shape import whole_context
from kvgate.wire.engines import Engine

# For the last bytes of ended streams to leave, after the drain.
FLUSH_SECONDS = 1.0
LOOK_SECONDS = 0.05


class Gateway:
    """Admission in front of the engines at `settings.upstreams`.

    `facts`: of the first of them; None: what the settings, or the engine itself, say.
    `connections_max` lowers `settings.max_connections` to what the process can hold. Raises `ValueError`
    for an upstream, certificates or a tokenizer that cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        facts: PoolFacts | None = None,
        *,
        policy: Policy = worst_case,
        connections_max: int | None = None,
    ) -> None:
        if not settings.upstreams:
            raise ValueError("Settings.upstreams must name the engine")
        self.upstreams = upstreams_of(settings, facts, policy)
        self.fleet = routing.Fleet(self.upstreams)
        self.neighbours = Neighbours(self.upstreams)
        self.bodies = BodyMemory(settings.body_memory)
        self.tls = (
            None if settings.tls_cert is None else listening_context(settings.tls_cert, settings.tls_key)
        )
        is_secured = any(Address.parse(given.url).is_tls for given in settings.upstreams)
        self._engine_tls = engine_context(settings.upstream_ca) if is_secured else None
        self._carried = connections_max
        self.clients: set[ClientConnection] = set()
        self.observers: list[Callable[[Finished], None]] = []
        self.loop_lag = LoopLag()
        # Only whoever owns the process may say when garbage is collected in it.
        self.collector: Collector | None = None
        self.is_draining = False
        self.requests = 0
        self.started = clock.now()
        self._listener: Listener | None = None
        self._housekeepers: list[asyncio.Task[None]] = []
        self.use(settings)

    def use(self, settings: Settings) -> None:
        """Take over what of `settings` can be changed at any time; `reload.apply` sees to the rest."""
        self.keys = None if settings.api_keys is None else read_keys(Path(settings.api_keys))
        self.settings = settings
        self.allow_paths = frozenset(path.encode("utf-8") for path in settings.allow_paths)
        header = settings.sticky_header
        self._sticky = None if header is None else header.lower().encode("ascii")
        wanted = settings.max_connections
        self.connections_max = wanted if self._carried is None else min(wanted, self._carried)
        self.bodies.limit = settings.body_memory
        for upstream in self.upstreams:
            upstream.use(settings, self.keys)
            upstream.read_key(settings)
        if self._listener is not None:
            self._listener.watch(settings.client_idle_timeout)

    def reload(self, settings: Settings) -> reload.Reloaded:
        """Swap limits without dropping a stream. Raises `reload.CannotReload`, with nothing changed."""
        return reload.apply(self, settings)

    async def start(self) -> None:
        """Listen. Raises `OSError` if the address cannot be had, `SizesUnknown` if an engine that
        answers does not tell its sizes."""
        settings = self.settings
        self.loop = asyncio.get_running_loop()
        engines: dict[int, Upstream] = {}
        for upstream in self.upstreams:
            sibling = engines.setdefault(id(upstream.given), upstream)
            if sibling is upstream:
                tls = self._engine_tls if Address.parse(upstream.url).is_tls else None
                upstream.open(self.loop, settings, tls)
            else:
                upstream.open_beside(sibling, self.loop)
        listener = Listener(
            settings.listen_host,
            settings.listen_port,
            tls=self.tls,
            idle_timeout=settings.client_idle_timeout,
        )
        await listener.open(self.loop, lambda: ClientConnection(self))
        self._listener = listener
        self.loop_lag.start(self.loop)
        self.neighbours.meet()
        for upstream in self.upstreams:
            if upstream.is_sized:
                sizing.watch(upstream, settings)
        await probe(self, self.engines)
        for upstream in self.engines:
            may_tell_later = not upstream.model_objects and not upstream.needs_key
            if upstream.pool.is_up and not upstream.is_sized and not may_tell_later:
                # It has loaded its model, or wants a key: it will not tell more later.
                await self.stop()
                raise sizing.SizesUnknown(f"{upstream.url}: {upstream.unsized_why}")
        self._housekeepers = [
            self.loop.create_task(each(self)) for each in (keep_house, keep_known, keep_watch)
        ]

    async def stop(self) -> None:
        """Refuse newcomers, wait up to `drain_timeout` for those inside, then end and close everything."""
        self.is_draining = True
        for client in list(self.clients):
            client.close_if_idle()
        await self._until(lambda: all(c.exchange is None for c in self.clients), self.settings.drain_timeout)
        if self._listener is not None:
            self._listener.close()
        late = [client for client in self.clients if client.exchange is not None]
        for client in late:
            # Taken apart: an exchange that ends can end others with it.
            if client.exchange is not None:
                client.exchange.break_off("The gateway is shutting down.")
        await self._until(lambda: all(client.is_flushed for client in late), FLUSH_SECONDS)
        for client in list(self.clients):
            client.shut()
        for each in self._housekeepers:
            each.cancel()
        self.loop_lag.stop()
        for upstream in self.engines:
            await upstream.counter.stop()
            upstream.pool.close()
        # Let closed transports report back before the loop goes.
        await asyncio.sleep(0)

    @property
    def port(self) -> int:
        """The port that is listened on; differs from the setting where that is 0. 0: a Unix socket."""
        assert self._listener is not None
        return self._listener.port

    @property
    def ready(self) -> bool:
        """True while requests are taken and one engine at least can be reached."""
        return self._listener is not None and not self.is_draining and any(u.is_up for u in self.upstreams)

    @property
    def engines(self) -> list[Upstream]:
        """One upstream of each engine; its ranks share its connections."""
        return [upstream for upstream in self.upstreams if not upstream.rank]

    def expect_ranks(self, upstream: Upstream, ranks: int) -> None:
        """The engine has so many data-parallel ranks that can be pinned: a pool for each."""
        upstream.be_rank(0)
        policy, settings = upstream.gate.policy, self.settings
        at = self.upstreams.index(upstream) + 1
        for rank in range(1, ranks):
            other = Upstream(upstream.given, settings, upstream.facts, policy=policy, rank=rank)
            other.be(upstream.engine.name)
            other.open_beside(upstream, self.loop)
            other.list_models(upstream.model_objects)
            other.use(settings, self.keys)
            self.upstreams.insert(at + rank - 1, other)
            sizing.watch(other, settings)
        sizing.watch(upstream, settings)
        self.fleet = routing.Fleet(self.upstreams)
        self.neighbours.meet()

    # --- which pool

    def may_enter(self, headers: Headers) -> bool:
        """False where there is a list of API keys, and the request has none of them."""
        return self.keys is None or self.upstreams[0].tenants.may_enter(headers)

    def choose(
        self,
        pools: tuple[Upstream, ...],
        shape: Shape,
        prompts: tuple[int, ...] | None,
        headers: Headers,
    ) -> tuple[Upstream, Ask]:
        """The pool that gets a counted request, and the question for its gate."""
        if len(pools) == 1:
            return pools[0], self.ask_for(pools[0], shape, prompts, headers)
        session = None
        if self._sticky is not None:
            session = next((value for name, value in headers if name.lower() == self._sticky), None)
        return routing.choose(
            pools, lambda each: self.ask_for(each, shape, prompts, headers), session, clock.now()
        )

    def ask_for(
        self, upstream: Upstream, shape: Shape, prompts: tuple[int, ...] | None, headers: Headers
    ) -> Ask:
        """The question for a gate, out of a shape and its counts (None: each costs a context). Who asks
        is left to `identity.in_full`."""
        tenant, own = upstream.tenants.of(headers)
        rules = both(reload.cap_rules(self.settings, shape), own)
        if prompts is None:
            requested = requested_cap(shape.output_cap, rules)
            prompts = whole_context(shape, upstream.facts.context, requested)
        wait = self.settings.max_wait
        return Ask(prompts, shape.output_cap, shape.choices, rules, wait, clock.draw(), tenant)

    # --- the first pool, for those who know that there is one

    @property
    def gate(self) -> Gate:
        return self.upstreams[0].gate

    @property
    def keeper(self) -> Gatekeeper:
        return self.upstreams[0].keeper

    @property
    def pool(self) -> EnginePool:
        return self.upstreams[0].pool

    @property
    def counter(self) -> Counter:
        return self.upstreams[0].counter

    @property
    def engine(self) -> Engine:
        return self.upstreams[0].engine

    # --- what is told

    def observe(self, finished: Finished) -> None:
        """Tell the observers of a priced request that is over."""
        for observer in self.observers:
            observer(finished)

    async def explain(self, path: str, body: bytes) -> dict[str, Any]:
        """What a POST of `body` to `path` would be answered now. Reserves nothing."""
        return await explain_request(self, path, body)

    def snapshot(self) -> dict[str, Any]:
        """The state of the gateway as plain values, for `/status` and `/metrics`."""
        return {"version": __version__, "is_compiled": is_compiled, **snapshot(self)}

    async def _until(self, is_so: Callable[[], bool], within: float) -> None:
        # Polled: a drain is rare, and an event would have to be kept right at every ending.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                while not is_so():  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_SECONDS)
