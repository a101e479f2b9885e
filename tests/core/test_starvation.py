"""The stated bound: a request that is the first of its class is passed `passes_max` times and no more, so
it waits at most for those, and for what was live when it became the first."""

from __future__ import annotations

import heapq
from random import Random

import pytest
from gates import pool

from kvgate.core.gate import Gate
from kvgate.core.records import Ask, Ending, Granted, Key, Queued, Tenant

POOL = 100
LONGEST = 10.0  # seconds that a small one lives at most


class Flood:
    """Small requests at `load` times what the pool can serve, for ever."""

    def __init__(self, gate: Gate, seed: int, load: float, wait: float, tenant: Tenant) -> None:
        self.gate, self.rng, self.wait, self.tenant = gate, Random(seed), wait, tenant
        self.now = 0.0
        self.rate = load * POOL / (3.0 * LONGEST / 2)  # of 1 to 5 blocks each, half of LONGEST
        self.next = 0.0
        self.ends: list[tuple[float, Key]] = []
        self.granted: list[Key] = []  # in their order

    def live(self, key: Key) -> None:
        heapq.heappush(self.ends, (self.now + self.rng.uniform(0.1, LONGEST), key))
        self.granted.append(key)

    def step(self) -> None:
        """Whatever comes next: an end, or one more small request."""
        if self.ends and self.ends[0][0] <= self.next:
            self.now, key = heapq.heappop(self.ends)
            for answer in self.gate.ended(key, Ending.COMPLETED, self.now):
                if isinstance(answer, Granted):
                    self.live(answer.key)
            return
        self.now = self.next
        self.next += self.rng.expovariate(self.rate)
        answer = self.gate.ask(
            Ask((1,), self.rng.randint(1, 5), max_wait=self.wait, tenant=self.tenant), self.now
        )
        if isinstance(answer, Granted):
            self.live(answer.key)
        for late in self.gate.tick(self.now):
            if isinstance(late, Granted):
                self.live(late.key)


@pytest.mark.parametrize("wait", [0.0, 5.0])
@pytest.mark.parametrize("passes", [0, 8, 32])
@pytest.mark.parametrize("other", [Tenant(), Tenant("others")])
@pytest.mark.parametrize("seed", range(5))
def test_a_large_one_is_let_in_within_the_bound_however_many_small_ones_come(
    wait: float, passes: int, other: Tenant, seed: int
) -> None:
    gate = Gate(pool(POOL), passes_max=passes, line_limit=10_000)
    flood = Flood(gate, seed, 1.2, wait, other)
    while flood.now < 60.0:
        flood.step()
    large = gate.ask(Ask((1,), 80, max_wait=1e6), flood.now)
    assert isinstance(large, Queued)
    while (head := gate.line.shares.head(POOL)) is None or head.key != large.key:
        flood.step()
        assert large.key not in flood.granted
    first_at, before = flood.now, len(flood.granted)
    live_until = max(end for end, _ in flood.ends)
    while large.key not in flood.granted:
        flood.step()
    assert flood.granted.index(large.key) - before <= passes
    # Those that passed it live LONGEST at most; then nobody else can stand in its way.
    assert flood.now <= max(live_until, first_at + (1 + passes) * LONGEST)


@pytest.mark.parametrize("seed", range(5))
def test_a_large_one_of_a_small_tenant_does_not_wait_behind_the_flood_of_another(seed: int) -> None:
    gate = Gate(pool(POOL), line_limit=10_000)
    flood = Flood(gate, seed, 3.0, 30.0, Tenant("flood"))
    while flood.now < 60.0:
        flood.step()
    waiting = len(gate.line)
    assert waiting > 50
    large = gate.ask(Ask((1,), 80, max_wait=1e6, tenant=Tenant("small")), flood.now)
    assert isinstance(large, Queued)
    asked, before = flood.now, len(flood.granted)
    while large.key not in flood.granted:
        flood.step()
    assert flood.granted.index(large.key) - before < waiting, "it would have waited for all who came before"
    assert flood.now - asked < 3 * LONGEST
