"""One chaos run: clients, engine, gateway, the disturbances between them, and the audit every second.

Promises: every process it starts is ended; the clients' and the disturbances' choices follow from the
seed; a broken law is kept with its second, and does not stop the run.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kvgate.lab.chaos import caller
from kvgate.lab.chaos.laws import Laws
from kvgate.lab.chaos.plan import BLOCK_SIZE, CONTEXT, Plan, draw
from kvgate.lab.chaos.processes import finish, free_port, spawn

TOTAL_BLOCKS = 9_000
SIZES = (9_000, 9_000, 6_000, 2_000, 14_000)  # most requests cost 10 to 100 blocks
ABORT_GRACE = 0.5
ENGINE_IDLE = 3.0
RESIZE_EVERY, KILL_EVERY = (1.0, 6.0), (8.0, 25.0)
HONEST = frozenset({200, 413, 429, 503})  # what a calm request may be answered
SETTLE = 12.0  # the engine's idle connections are closed within this


@dataclass(slots=True)
class Result:
    """What a run has shown. Times in seconds."""

    seed: int
    seconds: float
    audits: int = 0
    broken: list[str] = field(default_factory=list)
    endings: Counter[str] = field(default_factory=Counter)
    live: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    audit_longest: float = 0.0
    kills: int = 0
    resizes: int = 0
    empty_after: float = 0.0
    counters: dict[str, Any] = field(default_factory=dict)
    loop: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        shown = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("live", "waiting", "resident"):
            values = shown.pop(name) or [0]
            shown[name] = {"median": statistics.median(values), "max": max(values), "last": values[-1]}
        return shown

    def unexplained(self) -> list[dict[str, Any]]:
        """Stalls of the loop that were work of ours, and no step that names itself."""
        return [s for s in self.loop["stalls"] if s["cause"] == "work" and not s["step"]]


class Chaos:
    """A run in progress."""

    def __init__(self, seed: int, seconds: float, streams: int, progress: Callable[[str], None]) -> None:
        self.result = Result(seed, seconds)
        self.laws = Laws()
        self.streams = streams
        self.progress = progress
        self.engine_port = free_port()
        self.engine: asyncio.subprocess.Process | None = None
        self.engine_life = 0  # odd while it runs
        self.settings: dict[str, Any] = {
            "upstreams": [f"http://127.0.0.1:{self.engine_port}"],
            "engine": "llamacpp",
            "listen_port": 0,
            "max_wait": 1.0,
            "abort_grace": ABORT_GRACE,
            "connect_timeout": 2.0,
            "count_timeout": 2.0,
            "engine_idle_timeout": ENGINE_IDLE,
            "client_timeout": 5.0,
            "drain_timeout": 5.0,
        }
        self._asking = asyncio.Lock()

    async def run(self) -> Result:
        await self._start_engine()
        self.host = await spawn("kvgate.lab.chaos.host")
        try:
            facts = {"total_blocks": TOTAL_BLOCKS, "block_size": BLOCK_SIZE, "context": CONTEXT}
            where = await self._ask({"settings": self.settings | facts, "facts": facts})
            self.port = where["port"]
            await self._storm()
            await self._settle()
            self.result.loop = await self._ask({"do": "report"})
        finally:
            await finish(self.host)
            if self.engine is not None:
                await finish(self.engine)
        self.result.broken += self.laws.broken
        if not self.result.endings["calm: whole 200"]:
            self.result.broken.append("no calm request was answered: nothing was tried")
        return self.result

    async def _storm(self) -> None:
        end = time.monotonic() + self.result.seconds
        clients = [asyncio.create_task(self._client(n, end)) for n in range(self.streams)]
        others = [
            asyncio.create_task(work) for work in (self._audits(end), self._resizes(end), self._kills(end))
        ]
        try:
            for task in others:
                await task
            await asyncio.gather(*clients)
        finally:
            for task in (*clients, *others):
                task.cancel()
            await asyncio.gather(*clients, *others, return_exceptions=True)

    # --- clients

    async def _client(self, number: int, end: float) -> None:
        rng = Random(f"{self.result.seed}/client {number}")
        connection: caller.Connection | None = None
        while time.monotonic() < end:
            plan = draw(rng)
            life = self.engine_life
            try:
                if connection is None or connection.is_closed:
                    connection = await caller.connect(self.port)
                ending = await caller.call(plan, connection)
            except OSError as error:
                self.result.broken.append(f"client {number}: {error}")
                return
            self._judge(plan, connection, ending, was_undisturbed=life == self.engine_life and life % 2 == 1)
            if ending != "whole" or not (plan.is_reused and connection.can_be_reused):
                connection.leave(is_reset=False)
                connection = None
            await asyncio.sleep(plan.pause)
        if connection is not None:
            connection.leave(is_reset=False)

    def _judge(self, plan: Plan, answer: caller.Connection, ending: str, *, was_undisturbed: bool) -> None:
        status = answer.status if ending == "whole" else 0
        self.result.endings[f"{plan.describe()}: {ending} {status or ''}".rstrip()] += 1
        when = f"at {time.monotonic():.3f}, {plan}"
        if ending == "silent":
            self.result.broken.append(f"{when}: no answer within {caller.GIVE_UP:g} s")
        blocks = answer.headers.get(b"x-kvgate-reserved-blocks")
        if blocks is not None and int(blocks) != plan.blocks:
            self.result.broken.append(f"{when}: {int(blocks)} blocks reserved, {plan.blocks} expected")
        if not plan.is_calm or not was_undisturbed:
            return
        is_right = ending == "whole" and status in HONEST
        if is_right and status == 200 and plan.stream:
            is_right = answer.is_ended and answer.events == plan.generated + 2
        if not is_right:
            text = f"{ending} {answer.status}, {answer.events} events, last {answer.last[-300:]!r}"
            self.result.broken.append(f"{when}: calm, but {text}")

    # --- disturbances

    async def _resizes(self, end: float) -> None:
        rng = Random(f"{self.result.seed}/resizes")
        while await _pause(rng.uniform(*RESIZE_EVERY), end):
            page = await self._ask({"do": "reload", "settings": {"total_blocks": rng.choice(SIZES)}})
            self.laws.shrunk(page)
            self.result.resizes += 1

    async def _kills(self, end: float) -> None:
        rng = Random(f"{self.result.seed}/kills")
        while await _pause(rng.uniform(*KILL_EVERY), end):
            assert self.engine is not None
            self.engine_life += 1
            self.engine.kill()
            await self.engine.wait()
            self.result.kills += 1
            await asyncio.sleep(rng.uniform(0.0, 2.0))
            await self._start_engine()

    async def _start_engine(self) -> None:
        self.engine = await spawn("kvgate.lab.scripted_engine", "--port", str(self.engine_port))
        assert self.engine.stdout is not None
        if not await self.engine.stdout.readline():
            raise RuntimeError("the scripted engine did not start")
        self.engine_life += 1

    # --- audit

    async def _audits(self, end: float) -> None:
        began = time.monotonic()
        while await _pause(1.0 - (time.monotonic() - began) % 1.0, end):
            second = time.monotonic() - began
            before = await self._audit(f"second {second:.0f}")
            life = self.engine_life
            books = await self._books()
            if books is not None:
                after = await self._audit(f"second {second:.0f}, again")
                if life == self.engine_life:
                    self.laws.engine(before, books, after, f"second {second:.0f}")
            self.result.audits += 1
            self.result.live.append(before["pool"]["live"])
            self.result.waiting.append(before["pool"]["waiting"])
            self.result.resident.append(before["resident"])
            broken = len(self.laws.broken) + len(self.result.broken)
            self.progress(
                f"{second:4.0f} s: {before['pool']['live']} reserved, {before['pool']['waiting']} wait, "
                f"{before['sockets']} sockets to the engine, {broken} complaints"
            )

    async def _audit(self, when: str) -> dict[str, Any]:
        page = await self._ask({"do": "audit"})
        self.laws.page(page, when)
        self.result.audit_longest = max(self.result.audit_longest, page["audit_seconds"])
        return page

    async def _settle(self) -> None:
        """Everything has to become 0: what was cut off within its grace, the rest before `SETTLE`."""
        began = time.monotonic()
        while True:
            page, books = await self._audit("while it empties"), await self._books()
            pool = page["pool"]
            took = time.monotonic() - began
            if not self.result.empty_after and not (pool["live"] or pool["waiting"] or page["clients"]):
                self.result.empty_after = took
            if took > SETTLE or (self.result.empty_after and not page["sockets"]):
                break
            await asyncio.sleep(0.05)
        if not 0 < self.result.empty_after <= ABORT_GRACE + 2.0:
            self.result.broken.append(f"empty only after {self.result.empty_after:.1f} s")
        self.laws.empty(page, books or {"open": -1, "busy": -1})
        self.result.counters = page["counters"]

    async def _books(self) -> dict[str, int] | None:
        """The engine's own count of generations; None while it is down."""
        try:
            async with asyncio.timeout(5.0):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.engine_port)
                try:
                    writer.write(b"GET /script/stats HTTP/1.1\r\nhost: e\r\nconnection: close\r\n\r\n")
                    text = (await reader.read()).partition(b"\r\n\r\n")[2]
                finally:
                    writer.close()
            page = json.loads(text)
        except (OSError, TimeoutError, ValueError):
            return None
        return {"open": page["open"], "busy": page["busy"]}

    async def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        async with self._asking:
            assert self.host.stdin is not None
            assert self.host.stdout is not None
            if self.host.returncode is None:
                self.host.stdin.write(json.dumps(command).encode() + b"\n")
            line = await self.host.stdout.readline()
        if not line:
            raise RuntimeError("the gateway's process has ended; it says why above")
        answer: dict[str, Any] = json.loads(line)
        return answer


async def _pause(seconds: float, end: float) -> bool:
    """Sleep, but not beyond `end`. False when that is reached."""
    left = end - time.monotonic()
    await asyncio.sleep(max(0.0, min(seconds, left)))
    return seconds < left
