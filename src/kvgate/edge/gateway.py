"""The gateway of one engine: the gate, the connections on both sides, and what runs now and then.

`start` listens; `stop` refuses newcomers, lets streams finish for a while, then closes. The admin
server and the telemetry read `snapshot`; nothing here writes to a log or serves metrics itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvgate import __version__
from kvgate.config import Settings
from kvgate.core.gate import Gate
from kvgate.core.policy import Policy, worst_case
from kvgate.core.records import Ask, CapRules, PoolFacts
from kvgate.edge import clock
from kvgate.edge.counting import Counter, CountRefused
from kvgate.edge.explain import explain_ask
from kvgate.edge.gatekeeper import Gatekeeper
from kvgate.edge.relay.client import ClientConnection
from kvgate.edge.relay.heads import request_head
from kvgate.edge.relay.pool import EnginePool, EngineUnavailable
from kvgate.wire.body import BadBody
from kvgate.wire.dialects.openai import Shape
from kvgate.wire.engines.known import ENGINES
from kvgate.wire.routes import PRICED

LISTEN_BACKLOG = 2048
SWEEP_SECONDS = 1.0
PROBE_SECONDS = 2.0
PROBE_TIMEOUT = 2.0


@dataclass(frozen=True, slots=True)
class Finished:
    """A priced request that has been answered, or whose client has gone."""

    outcome: str
    seconds: float
    wait_seconds: float


class Gateway:
    """Admission in front of the engine at `settings.upstream`."""

    def __init__(self, settings: Settings, facts: PoolFacts, *, policy: Policy = worst_case) -> None:
        if settings.upstream is None:
            raise ValueError("Settings.upstream must name the engine")
        self.settings = settings
        self.engine = ENGINES[settings.engine or "llamacpp"]
        self.gate = Gate(facts, policy=policy, line_limit=settings.line_limit)
        self.allow_paths = frozenset(path.encode("utf-8") for path in settings.allow_paths)
        grace = settings.abort_grace
        self.abort_grace = self.engine.abort_grace if grace is None else grace
        self.clients: set[ClientConnection] = set()
        self.observers: list[Callable[[Finished], None]] = []
        self.is_draining = False
        self.requests = 0
        self._started = clock.now()
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None
        # The engine's default counts only where the operator has none, and only for completions.
        self._chat_rules = CapRules(settings.default_output_cap, settings.max_output_cap)
        default = settings.default_output_cap
        if default is None:
            default = self.engine.completions_default_cap
        self._completion_rules = CapRules(default, settings.max_output_cap)

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
        )
        self.counter = Counter(self.pool, self.engine, settings.count_timeout)
        self._server = await self.loop.create_server(
            lambda: ClientConnection(self),
            settings.listen_host,
            settings.listen_port,
            backlog=LISTEN_BACKLOG,
        )
        await self._probe()
        self._sweeper = self.loop.create_task(self._sweep())

    async def stop(self) -> None:
        """Refuse newcomers, wait up to `drain_timeout` for those inside, then close everything."""
        self.is_draining = True
        for client in list(self.clients):
            client.close_if_idle()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.drain_timeout):
                await self._until_idle()
        if self._server is not None:
            self._server.close()
        for client in list(self.clients):
            client.shut()
        if self._sweeper is not None:
            self._sweeper.cancel()
        self.pool.close()
        # Let closed transports report back before the loop goes.
        await asyncio.sleep(0)

    @property
    def port(self) -> int:
        """The port that is listened on; differs from the setting where that is 0."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def ready(self) -> bool:
        """True while requests are taken and the engine can be reached."""
        return self._server is not None and not self.is_draining and self.pool.is_up

    def ask_for(self, shape: Shape, prompts: tuple[int, ...]) -> Ask:
        """The question for the gate, out of a shape and its exact counts."""
        return Ask(
            prompts,
            shape.output_cap,
            shape.choices,
            self._chat_rules if shape.is_chat else self._completion_rules,
            self.settings.max_wait,
            clock.draw(),
        )

    def observe(self, outcome: str, seconds: float, wait_seconds: float) -> None:
        if self.observers:
            finished = Finished(outcome, seconds, wait_seconds)
            for observer in self.observers:
                observer(finished)

    async def explain(self, path: str, body: bytes) -> dict[str, Any]:
        """What a POST of `body` to `path` would be answered now. Reserves nothing."""
        read = PRICED.get(path.partition("?")[0].encode("utf-8"))
        if read is None:
            return {"decision": "refuse", "reason": "unpriced_endpoint", "message": f"{path} is not priced."}
        try:
            shape = read(body)
            prompts = self.counter.known(shape) or await self.counter.count(shape, [], b"127.0.0.1")
        except BadBody as error:
            return {"decision": "refuse", "reason": "invalid_request", "message": str(error)}
        except CountRefused as error:
            text = error.answer.body.decode("utf-8", "replace")
            return {"decision": "refuse", "reason": "engine_error", "message": text}
        except EngineUnavailable as error:
            return {"decision": "refuse", "reason": "engine_unavailable", "message": str(error)}
        return explain_ask(self, self.ask_for(shape, prompts))

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
            "client_connections": len(self.clients),
            "engine_connections": self.pool.open_connections,
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

    async def _until_idle(self) -> None:
        # Polled: a drain is rare, and an event would have to be kept right at every ending.
        while any(client.exchange is not None for client in self.clients):  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def _sweep(self) -> None:
        """Every second: end what is silent, close what is idle, look whether the engine is back."""
        period = min(SWEEP_SECONDS, self.settings.engine_idle_timeout / 4, self.settings.client_timeout / 4)
        swept = probed = self.loop.time()
        while True:
            await asyncio.sleep(period)
            now = self.loop.time()
            was_held_up = now - swept > 2 * period
            swept = now
            if was_held_up:
                # What seems to be silence may lie unread in a socket: read it first, then judge.
                continue
            for client in list(self.clients):
                client.sweep(now, self.settings.client_timeout)
            self.pool.sweep()
            if len(self.gate.ledger) == 0:
                self.gate.ledger.recount()
            if not self.pool.is_up and now - probed >= PROBE_SECONDS:
                probed = now
                await self._probe()

    async def _probe(self) -> None:
        """Set `pool.is_up` by asking the engine for its models."""
        request = request_head(
            b"GET", self.pool.prefix + b"/v1/models", self.pool.authority, [], body_bytes=0, peer=b"127.0.0.1"
        )
        try:
            async with asyncio.timeout(PROBE_TIMEOUT):
                await self.pool.fetch(request)
        except (EngineUnavailable, TimeoutError):
            self.pool.is_up = False
