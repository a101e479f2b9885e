"""Clients in a closed loop: they ask, read the stream, and ask again at once.

Promises: everything random comes from the seed, and client number n asks the same requests in the same
order whatever stands behind the address. Gaps are between two pieces of one stream, never before the
first one, so that waiting for admission is none. Beside the load the engine is asked several times a
second whether it is well: a gap in which it did not answer that either is not its cache's doing.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from vllmsoak.servers import MODEL, metric

PREEMPTIONS, TOKENS = "vllm:num_preemptions_total", "vllm:generation_tokens_total"
# Not json.loads: events are many, and this client shares its cores with the engine.
_INDEX = re.compile(r'"index": ?(\d+)')
BODY: dict[str, Any] = {"model": MODEL, "ignore_eos": True, "temperature": 0, "stream": True}


# The client's own clock of itself: what is late here is not the engine's doing.
OWN_TICK = 0.01
STALL = 0.1
SHOWN = 20
# How often the engine is asked whether it is well.
WELL_PERIOD = 0.1


@dataclass
class Tally:
    """What one load of so many seconds came to. Gaps and stalls in seconds.

    `stalled_at`: the seconds of the load in which streams stalled longest, how many did and how long the
    longest of them took; `own_lag`: the longest delay of this client itself. `deaf_seconds`: how long the
    engine answered nobody, not even whether it is well; `worst_stall_while_well`, `stalls_while_well`:
    without that time.
    """

    how: str
    seconds: float
    preemptions: int
    worst_stall: float
    stalls_over_100ms: int
    tokens_per_second: float
    finished: int
    cancelled: int
    refused: int
    failed: int
    own_lag: float
    deaf_seconds: float
    worst_stall_while_well: float
    stalls_while_well: int
    stalled_at: dict[int, tuple[int, float]]


class Load:
    """`clients` clients against one address. `mix`: `plain` or `adversarial`."""

    def __init__(self, url: str, engine: str, clients: int, seed: int, mix: str) -> None:
        self.url = url
        self.engine = engine
        self.mix = mix
        self.clients = clients
        self.seed = seed
        self.finished = self.cancelled = self.refused = self.failed = 0
        self.gaps: list[float] = []
        self.stalled_at: dict[int, tuple[int, float]] = {}
        self.own_lag = 0.0
        self.long_gaps: list[tuple[float, float]] = []
        self.deaf: list[tuple[float, float]] = []
        self._started = 0.0

    async def run(
        self, seconds: float, between: Callable[[], None] | None = None, warm_up: float = 0.0
    ) -> None:
        """Load for `warm_up` and then `seconds` seconds; `between` is called in a thread between them."""
        limits = httpx.Limits(max_connections=None)
        self._started = time.monotonic()
        async with httpx.AsyncClient(base_url=self.url, timeout=None, limits=limits) as client:
            tasks = [
                asyncio.create_task(self._client(client, random.Random(self.seed * 1000 + number)))
                for number in range(self.clients)
            ]
            tasks.append(asyncio.create_task(self._watch_itself()))
            tasks.append(asyncio.create_task(self._watch_engine()))
            await asyncio.sleep(warm_up)
            if between is not None:
                await asyncio.to_thread(between)
            await asyncio.sleep(seconds)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch_itself(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(OWN_TICK)
            self.own_lag = max(self.own_lag, time.monotonic() - before - OWN_TICK)

    async def _watch_engine(self) -> None:
        async with httpx.AsyncClient(base_url=self.engine, timeout=None) as client:
            while True:
                asked = time.monotonic()
                await client.get("/health")
                if time.monotonic() - asked > STALL:
                    # From the last time that it was well, until it will be asked again.
                    self.deaf.append((asked - WELL_PERIOD, time.monotonic() + WELL_PERIOD))
                await asyncio.sleep(WELL_PERIOD)

    def stalls_while_well(self) -> list[float]:
        """What is left of the long gaps without the times in which the engine answered nobody."""
        left = [
            end - begin - sum(max(0.0, min(end, until) - max(begin, since)) for since, until in self.deaf)
            for begin, end in self.long_gaps
        ]
        return [seconds for seconds in left if seconds > STALL]

    def _gap(self, seconds: float, now: float) -> None:
        self.gaps.append(seconds)
        if seconds > STALL:
            self.long_gaps.append((now - seconds, now))
            at = int(now - self._started)
            streams, longest = self.stalled_at.get(at, (0, 0.0))
            self.stalled_at[at] = streams + 1, round(max(longest, seconds), 3)

    async def _client(self, client: httpx.AsyncClient, dice: random.Random) -> None:
        while True:
            body, leaves_after = plain(dice) if self.mix == "plain" else adversarial(dice)
            try:
                await self._stream(client, body, leaves_after)
            except httpx.TransportError:
                self.failed += 1

    async def _stream(
        self, client: httpx.AsyncClient, body: dict[str, Any], leaves_after: int | None
    ) -> None:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                self.refused += 1
                await answer.aread()
                await asyncio.sleep(float(answer.headers.get("retry-after", "1")))
                return
            last: dict[str, float] = {}
            pieces = 0
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    self.finished += 1
                    return
                now = time.monotonic()
                for choice in _choices(line):
                    if choice in last:
                        self._gap(now - last[choice], now)
                    last[choice] = now
                pieces += 1
                if leaves_after is not None and pieces >= leaves_after:
                    self.cancelled += 1
                    return
            self.failed += 1


def _choices(line: str) -> list[str]:
    """Whose tokens an event carries: a sequence that stalls must not hide behind its sibling."""
    return _INDEX.findall(line)


def plain(dice: random.Random) -> tuple[dict[str, Any], int | None]:
    """All alike: 200 in, 1,000 out, and every client stays."""
    return BODY | {"prompt": text(dice, 200), "max_tokens": 1000}, None


def adversarial(dice: random.Random) -> tuple[dict[str, Any], int | None]:
    """One request, and after how many pieces its client leaves (None: it stays)."""
    kind, body = dice.random(), dict(BODY)
    if kind < 0.60:  # short prompts that may become long: what overruns the cache
        body |= {"prompt": text(dice, dice.randint(20, 300)), "max_tokens": dice.randint(600, 1400)}
    elif kind < 0.80:  # long prompts
        body |= {"prompt": text(dice, dice.randint(800, 2000)), "max_tokens": dice.randint(50, 300)}
    elif kind < 0.90:  # two sequences of one request
        # Greedily, both would be the same, and vLLM refuses that.
        body |= {"n": 2, "temperature": 1.0}
        body |= {"prompt": text(dice, dice.randint(20, 300)), "max_tokens": dice.randint(200, 700)}
    elif kind < 0.95:  # no cap: the engine's own
        body |= {"prompt": text(dice, dice.randint(20, 300))}
    else:  # more than there is
        body |= {"prompt": text(dice, 500), "max_tokens": 4000}
    return body, dice.randint(5, 400) if dice.random() < 0.15 else None


def text(dice: random.Random, size: int) -> str:
    # Unlike any other, so that no prefix is shared: each must have its own blocks.
    return "".join(dice.choices("abcdefghijklmnopqrstuvwxyz ", k=size))


def measured(how: str, engine: str, load: Load, seconds: float, warm_up: float = 0.0) -> Tally:
    """Run the load, and read at `engine` what it did meanwhile.

    Everything counts from the first second, except the throughput: at the start all are young and
    hold little, and an `auto` fraction has not yet risen, so that counts after `warm_up` seconds.
    """
    preempted, started = metric(engine, PREEMPTIONS), time.monotonic()
    mark = [started, 0.0]

    def between() -> None:
        mark[:] = [time.monotonic(), metric(engine, TOKENS)]

    asyncio.run(load.run(seconds, between, warm_up))
    ended, tokens = time.monotonic(), metric(engine, TOKENS)
    return Tally(
        how=how,
        seconds=round(ended - started, 1),
        preemptions=int(metric(engine, PREEMPTIONS) - preempted),
        worst_stall=round(max(load.gaps, default=0.0), 3),
        stalls_over_100ms=sum(gap > STALL for gap in load.gaps),
        tokens_per_second=round((tokens - mark[1]) / (ended - mark[0]), 1),
        finished=load.finished,
        cancelled=load.cancelled,
        refused=load.refused,
        failed=load.failed,
        own_lag=round(load.own_lag, 3),
        deaf_seconds=round(sum(until - since - 2 * WELL_PERIOD for since, until in load.deaf), 1),
        worst_stall_while_well=round(max(load.stalls_while_well(), default=0.0), 3),
        stalls_while_well=len(load.stalls_while_well()),
        stalled_at=dict(sorted(load.stalled_at.items(), key=lambda at: -at[1][1])[:SHOWN]),
    )
