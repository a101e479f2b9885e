"""Clients that are refused and come back, an engine that takes its time, and the real `Gate` between.

Discrete events on one thread: no clock is read and nobody waits. Clients have three tries, as OpenAI's
and Anthropic's libraries have, and obey what they are told to the millisecond.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import TypeAlias

from kvgate.core.gate import Gate
from kvgate.core.records import Ask, Ending, Granted, Key, PoolFacts, Queued, Refused
from kvgate.lab.retry_traffic import BLOCK, Wish

TRIES = 3
BIN = 0.1  # seconds; the grain in which a herd is seen
Wait: TypeAlias = Callable[[Refused, int, Random], float | None]
"""(refusal, tries so far, chance) -> seconds until the client comes back; None: it gives up."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One way of refusing, and of coming back. `knows`: whether the gate is told who comes back."""

    name: str
    wait: Wait
    max_wait: float = 0.0
    knows: bool = False


@dataclass(slots=True)
class Figures:
    """What was measured. Waits in seconds, from the first question to the admission."""

    failed: int = 0
    attempts: int = 0
    waits: list[float] = field(default_factory=list)
    retries: Counter[int] = field(default_factory=Counter)  # by bin
    block_seconds: float = 0.0
    pool_seconds: float = 0.0
    errors: list[tuple[float, float, float]] = field(default_factory=list)  # stated, expected, actual

    @property
    def served(self) -> int:
        return len(self.waits)

    @property
    def failed_share(self) -> float:
        return self.failed / max(1, self.served + self.failed)

    @property
    def attempts_per_success(self) -> float:
        return self.attempts / max(1, self.served)

    @property
    def peak(self) -> int:
        return max(self.retries.values(), default=0)

    @property
    def utilisation(self) -> float:
        return self.block_seconds / self.pool_seconds if self.pool_seconds else 0.0

    def wait_quantile(self, share: float) -> float:
        return quantile(self.waits, share)


def quantile(values: Iterable[float], share: float) -> float:
    """The least value that at least `share` of them do not exceed; 0 for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


@dataclass(slots=True)
class _Client:
    number: int
    wish: Wish
    tries: int = 0


class World:
    """One run of one rule over one stream of wishes."""

    def __init__(self, rule: Rule, pool_blocks: int, seed: int, warm_up: float = 0.0) -> None:
        self.rule, self.rng, self.warm_up = rule, Random(seed), warm_up
        context = pool_blocks * BLOCK
        self.gate = Gate(PoolFacts(pool_blocks, BLOCK, context, safety_fraction=1.0), line_limit=100_000)
        self.figures = Figures()
        self.now = self._since = 0.0
        self._events: list[tuple[float, int, Callable[[_Client, Key], None], _Client, Key]] = []
        self._serial = 0
        self._clients: dict[Key, _Client] = {}
        # Refused sizes that have not fitted since: (blocks, refused at, stated, expected).
        self._unfit: list[tuple[int, float, float, float]] = []

    def run(self, wishes: Iterable[Wish]) -> Figures:
        end = 0.0
        for number, wish in enumerate(wishes, start=1):
            self._until(wish.at)
            self._account(wish.at)
            self._asks(_Client(number, wish), 0)
            end = wish.at
        self._until(end)
        self.figures.pool_seconds = self.gate.facts.usable_blocks * (end - self.warm_up)
        counted, self.figures.block_seconds = self.figures.block_seconds, 0.0
        self._until(float("inf"))
        self.figures.block_seconds = counted
        return self.figures

    def _until(self, moment: float) -> None:
        while True:
            wake = self.gate.wake_at()
            at = self._events[0][0] if self._events else float("inf")
            if wake is not None and wake <= min(at, moment):
                self._account(wake)
                self._deliver(self.gate.tick(self.now))
            elif self._events and at <= moment:
                at, _, call, client, key = heapq.heappop(self._events)
                self._account(at)
                call(client, key)
            else:
                return

    def _account(self, now: float) -> None:
        if now > self.warm_up:
            since = max(self._since, self.warm_up)
            self.figures.block_seconds += self.gate.ledger.reserved_blocks * (now - since)
        self.now = self._since = now

    def _later(
        self, seconds: float, call: Callable[[_Client, Key], None], client: _Client, key: Key = 0
    ) -> None:
        heapq.heappush(self._events, (self.now + seconds, self._serial, call, client, key))
        self._serial += 1

    @property
    def _counts(self) -> bool:
        return self.now >= self.warm_up

    def _asks(self, client: _Client, _: Key) -> None:
        wish, counts = client.wish, client.wish.at >= self.warm_up
        if client.tries and self._counts:
            self.figures.retries[int(self.now / BIN)] += 1
        self.figures.attempts += counts
        identity, tries = (client.number, client.tries) if self.rule.knows else (0, 0)
        client.tries += 1
        ask = Ask(
            (wish.prompt,), wish.cap, max_wait=self.rule.max_wait, draw=self.rng.random(),
            identity=identity, tries=tries,
        )  # fmt: skip
        answer = self.gate.ask(ask, self.now)
        if isinstance(answer, Queued):
            self._clients[answer.key] = client
        elif isinstance(answer, Granted):
            self._granted(client, answer)
        else:
            self._refused(client, answer)

    def _granted(self, client: _Client, answer: Granted) -> None:
        if client.wish.at >= self.warm_up:
            self.figures.waits.append(self.now - client.wish.at)
        self._later(client.wish.life, self._ends, client, answer.key)

    def _ends(self, client: _Client, key: Key) -> None:
        self._deliver(self.gate.ended(key, Ending.COMPLETED, self.now))
        self._fits()

    def _refused(self, client: _Client, answer: Refused) -> None:
        wait = self.rule.wait(answer, client.tries, self.rng) if client.tries < TRIES else None
        if self._counts and answer.retry_after is not None:
            short = client.wish.blocks - self.gate.ledger.free_blocks
            expected = self.gate.forecast.room_in(short + self.gate.line.blocks, self.now)
            insort(self._unfit, (client.wish.blocks, self.now, answer.retry_after, expected))
        if wait is None:
            self.figures.failed += client.wish.at >= self.warm_up
        else:
            self._later(wait, self._asks, client)

    def _deliver(self, answers: Iterable[Granted | Refused]) -> None:
        for answer in answers:
            assert answer.key is not None
            client = self._clients.pop(answer.key)
            if isinstance(answer, Granted):
                self._granted(client, answer)
            else:
                self._refused(client, answer)

    def _fits(self) -> None:
        """Those whose size fits now, if nobody else waits, learn how long it really took."""
        free = self.gate.ledger.free_blocks - self.gate.line.blocks
        at = bisect_right(self._unfit, (free, float("inf"), 0.0, 0.0))
        for _, when, stated, expected in self._unfit[:at]:
            self.figures.errors.append((stated, expected, self.now - when))
        del self._unfit[:at]
