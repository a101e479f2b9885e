"""The gateway of one engine: the gate, the connections on both sides, and what belongs to all requests.

`start` listens; `stop` refuses newcomers, lets streams finish for a while, then ends them. The admin
server and the telemetry read `snapshot`; nothing here writes to a log or serves metrics itself.
`listening`, `housekeeping` and `reload` are the parts that would hide this one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from kvgate import __version__
from kvgate.config import Settings
from kvgate.core.gate import Gate
from kvgate.core.policy import Policy, worst_case
from kvgate.core.price import requested_cap
from kvgate.core.records import Ask, PoolFacts
from kvgate.edge import clock, reload
from kvgate.edge.collector import Collector
from kvgate.edge.counting import Counter, CountRefused
from kvgate.edge.explain import explain_ask
from kvgate.edge.gatekeeper import Gatekeeper
from kvgate.edge.housekeeping import keep_house, probe
from kvgate.edge.listening import Listener
from kvgate.edge.loop_lag import LoopLag
from kvgate.edge.relay.body_memory import BodyMemory
from kvgate.edge.relay.client import ClientConnection
from kvgate.edge.relay.finished import Finished
from kvgate.edge.relay.pool import EnginePool, EngineUnavailable
from kvgate.edge.tls import engine_context, listening_context
from kvgate.wire.body import BadBody
from kvgate.wire.dialects.openai import Shape
from kvgate.wire.dialects.shape import whole_context
from kvgate.wire.engines.known import ENGINES
from kvgate.wire.routes import route_for

# For the last bytes of ended streams to leave, after the drain.
FLUSH_SECONDS = 1.0
LOOK_SECONDS = 0.05


class Gateway:
    """Admission in front of the engine at `settings.upstream`.

    `connections_max` lowers `settings.max_connections` to what the process can hold. Raises `ValueError`
    for an upstream or certificates that cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        facts: PoolFacts,
        *,
        policy: Policy = worst_case,
        connections_max: int | None = None,
    ) -> None:
        if settings.upstream is None:
            raise ValueError("Settings.upstream must name the engine")
        self.engine = ENGINES[settings.engine or "llamacpp"]
        self.gate = Gate(facts, policy=policy, line_limit=settings.line_limit)
        self.bodies = BodyMemory(settings.body_memory)
        self.tls = (
            None if settings.tls_cert is None else listening_context(settings.tls_cert, settings.tls_key)
        )
        is_secured = settings.upstream.startswith("https:")
        self._engine_tls = engine_context(settings.upstream_ca) if is_secured else None
        self._carried = connections_max
        self.clients: set[ClientConnection] = set()
        self.observers: list[Callable[[Finished], None]] = []
        self.loop_lag = LoopLag()
        # Only whoever owns the process may say when garbage is collected in it.
        self.collector: Collector | None = None
        self.is_draining = False
        self.requests = 0
        self._started = clock.now()
        self._listener: Listener | None = None
        self._housekeeper: asyncio.Task[None] | None = None
        self.use(settings)

    def use(self, settings: Settings) -> None:
        """Take over what of `settings` can be changed at any time; `reload.apply` sees to the rest."""
        self.settings = settings
        self.allow_paths = frozenset(path.encode("utf-8") for path in settings.allow_paths)
        grace = settings.abort_grace
        self.abort_grace = self.engine.abort_grace if grace is None else grace
        wanted = settings.max_connections
        self.connections_max = wanted if self._carried is None else min(wanted, self._carried)
        self.gate.line.limit = settings.line_limit
        self.bodies.limit = settings.body_memory
        if self._listener is not None:
            self.pool.connect_timeout = settings.connect_timeout
            self.counter.timeout = settings.count_timeout
            self._listener.watch(settings.client_idle_timeout)

    def reload(self, settings: Settings) -> reload.Reloaded:
        """Swap limits without dropping a stream. Raises `reload.CannotReload`, with nothing changed."""
        return reload.apply(self, settings)

    async def start(self) -> None:
        """Listen. Raises `OSError` if the address cannot be had."""
        settings = self.settings
        assert settings.upstream is not None
        self.loop = asyncio.get_running_loop()
        self.keeper = Gatekeeper(self.gate, self.loop)
        self.pool = EnginePool(
            settings.upstream,
            self.loop,
            connect_timeout=settings.connect_timeout,
            idle_timeout=self.engine.idle_connection,
            tls=self._engine_tls,
        )
        self.counter = Counter(self.pool, self.engine, settings.count_timeout)
        listener = Listener(
            settings.listen_host,
            settings.listen_port,
            tls=self.tls,
            idle_timeout=settings.client_idle_timeout,
        )
        await listener.open(self.loop, lambda: ClientConnection(self))
        self._listener = listener
        self.loop_lag.start(self.loop)
        await probe(self)
        self._housekeeper = self.loop.create_task(keep_house(self))

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
        if self._housekeeper is not None:
            self._housekeeper.cancel()
        self.loop_lag.stop()
        self.pool.close()
        # Let closed transports report back before the loop goes.
        await asyncio.sleep(0)

    @property
    def port(self) -> int:
        """The port that is listened on; differs from the setting where that is 0. 0: a Unix socket."""
        assert self._listener is not None
        return self._listener.port

    @property
    def ready(self) -> bool:
        """True while requests are taken and the engine can be reached."""
        return self._listener is not None and not self.is_draining and self.pool.is_up

    def ask_for(self, shape: Shape, prompts: tuple[int, ...] | None) -> Ask:
        """The question for the gate, out of a shape and its counts (None: each costs a context)."""
        rules = reload.cap_rules(self.settings, shape)
        if prompts is None:
            requested = requested_cap(shape.output_cap, rules)
            prompts = whole_context(shape, self.gate.facts.context, requested)
        return Ask(prompts, shape.output_cap, shape.choices, rules, self.settings.max_wait, clock.draw())

    def observe(self, outcome: str, seconds: float, wait_seconds: float, **figures: int | None) -> None:
        """Tell the observers of a priced request that is over; `figures` as in `Finished`."""
        if self.observers:
            finished = Finished(outcome, seconds, wait_seconds, **figures)
            for observer in self.observers:
                observer(finished)

    async def explain(self, path: str, body: bytes) -> dict[str, Any]:
        """What a POST of `body` to `path` would be answered now. Reserves nothing."""
        route = route_for(self.engine.routes, b"POST", path.partition("?")[0].encode("utf-8"))
        if route is None:
            return {"decision": "refuse", "reason": "unpriced_endpoint", "message": f"{path} is not priced."}
        try:
            shape = route.read(body)
            plan = self.counter.plan(shape)
            prompts = None
            if not plan.is_whole_context:
                prompts = plan.known or await self.counter.count(plan, [], b"127.0.0.1")
        except BadBody as error:
            return {"decision": "refuse", "reason": "invalid_request", "message": str(error)}
        except CountRefused as error:
            text = error.answer.body.decode("utf-8", "replace")
            return {"decision": "refuse", "reason": "engine_error", "message": text}
        except EngineUnavailable as error:
            return {"decision": "refuse", "reason": "engine_unavailable", "message": str(error)}
        return explain_ask(self, self.ask_for(shape, prompts), plan, route.cap_name)

    def snapshot(self) -> dict[str, Any]:
        """The state of the gateway as plain values, for `/status` and `/metrics`."""
        gate, facts = self.gate, self.gate.facts
        return {
            "version": __version__,
            "uptime_seconds": round(clock.now() - self._started, 3),
            "ready": self.ready,
            "draining": self.is_draining,
            "engine_up": self.pool.is_up,
            "upstream": self.settings.upstream,
            "engine_error": self.pool.last_error,
            "client_connections": len(self.clients),
            "connections_max": self.connections_max,
            "body_bytes_held": self.bodies.held,
            "engine_connections": self.pool.open_connections,
            "loop_lag": self.loop_lag.snapshot(),
            "pools": [
                {
                    "engine": facts.engine,
                    "total_blocks": facts.total_blocks,
                    "usable_blocks": facts.usable_blocks,
                    "reserved_blocks": gate.ledger.reserved_blocks,
                    "free_blocks": gate.ledger.free_blocks,
                    "block_size": facts.block_size,
                    "live": len(gate.ledger),
                    "lingering": self.keeper.lingering,
                    "waiting": len(gate.line),
                    "context": facts.context,
                    "max_seqs": facts.max_seqs,
                    "reserved_seqs": gate.ledger.reserved_seqs,
                    "safety_fraction": facts.safety_fraction,
                }
            ],
            "counters": {
                "requests": self.requests,
                "admissions": gate.admissions,
                "refusals": {reason.value: n for reason, n in gate.refusals.items()},
                "releases": {ending.value: n for ending, n in gate.releases.items()},
                "double_releases": gate.ledger.double_releases,
            },
        }

    async def _until(self, is_so: Callable[[], bool], within: float) -> None:
        # Polled: a drain is rare, and an event would have to be kept right at every ending.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                while not is_so():  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_SECONDS)
