"""Whose turn it is: by weight over time, without savings or debts, with floors and ceilings."""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict

import pytest
from gates import granted, pool, queued

from kvgate.core.gate import Gate
from kvgate.core.records import Ask, Ending, Granted, Key, Queued, Reason, Refused, Tenant


class World:
    """Clients that ask in a closed loop: `want` of a tenant's requests wait or run at all times."""

    def __init__(self, gate: Gate, seed: int = 1) -> None:
        self.gate, self.rng, self.now = gate, random.Random(seed), 0.0
        self.ends: list[tuple[float, Key, Tenant, int]] = []
        self.used: dict[str, float] = defaultdict(float)  # blocks x seconds, of those that have ended
        self.refused: Counter[tuple[str, str]] = Counter()
        self.asked: dict[Key, tuple[Tenant, int]] = {}

    def ask(self, tenant: Tenant, blocks: int, wait: float = 1e6) -> None:
        answer = self.gate.ask(Ask((1,), blocks, max_wait=wait, tenant=tenant), self.now)
        if isinstance(answer, Refused):
            self.refused[tenant.name, answer.reason.value] += 1
            return
        self.asked[answer.key] = tenant, blocks
        if isinstance(answer, Granted):
            self.start(answer.key)

    def start(self, key: Key) -> None:
        tenant, blocks = self.asked[key]
        life = self.rng.uniform(1, 10)
        self.used[tenant.name] += blocks * life
        heapq.heappush(self.ends, (self.now + life, key, tenant, blocks))

    def run(self, until: float, again: bool = True) -> None:
        while self.ends and self.ends[0][0] <= until:
            self.now, key, tenant, blocks = heapq.heappop(self.ends)
            for answer in self.gate.ended(key, Ending.COMPLETED, self.now):
                assert isinstance(answer, Granted)
                self.start(answer.key)
            if again:
                self.ask(tenant, blocks)
        self.now = until


@pytest.mark.parametrize(
    ("weights", "sizes"),
    [((1, 1), (1, 1)), ((3, 1), (1, 1)), ((1, 1), (8, 1)), ((1, 2, 4), (5, 2, 1)), ((1, 1), (16, 1))],
)
def test_tenants_that_want_more_than_there_is_get_it_by_weight(
    weights: tuple[float, ...], sizes: tuple[int, ...]
) -> None:
    world = World(Gate(pool(20), line_limit=10_000))
    tenants = [Tenant(f"t{n}", weight) for n, weight in enumerate(weights)]
    for _ in range(60):
        for tenant, size in zip(tenants, sizes, strict=True):
            world.ask(tenant, size)
    world.run(4000)
    total = sum(world.used.values())
    for tenant in tenants:
        share = tenant.weight / sum(weights)
        assert world.used[tenant.name] / total == pytest.approx(share, abs=0.03)


def test_the_share_of_one_that_wants_nothing_goes_to_the_others() -> None:
    world = World(Gate(pool(20)))
    world.ask(Tenant("idle", 100.0), 1)
    world.run(20, again=False)
    for _ in range(40):
        world.ask(Tenant("busy"), 1)
    world.run(1000)
    assert world.used["busy"] > 0.95 * 20 * 980


def test_who_was_alone_for_long_owes_nothing_and_who_was_away_has_saved_nothing() -> None:
    world = World(Gate(pool(20), line_limit=10_000))
    old, new = Tenant("old"), Tenant("new")
    for _ in range(60):
        world.ask(old, 1)
    world.run(2000)
    world.used.clear()
    for _ in range(60):
        world.ask(new, 1)
    world.run(2000 + 400)
    total = sum(world.used.values())
    assert world.used["new"] / total == pytest.approx(0.5, abs=0.05)


def test_a_thousand_requests_of_one_tenant_do_not_keep_the_two_of_another_out() -> None:
    world = World(Gate(pool(20), line_limit=500))
    big, small = Tenant("big"), Tenant("small")
    for _ in range(1000):
        world.ask(big, 1)
    assert world.refused["big", "queue_full"] > 0
    world.refused.clear()
    for n in range(200):
        world.ask(small, 1, wait=30.0)
        world.ask(small, 1, wait=30.0)
        world.run(world.now + 5.0, again=False)
        for _ in range(1000):
            world.ask(big, 1)
        assert not any(name == "small" for name, _ in world.refused), f"round {n}"
        answers = world.gate.tick(world.now)
        assert answers == []
        for key in [end[1] for end in world.ends if end[2] is small]:
            world.ends = [end for end in world.ends if end[1] != key]
            heapq.heapify(world.ends)
            for answer in world.gate.ended(key, Ending.COMPLETED, world.now):
                world.start(answer.key or 0)


def test_a_flood_of_a_higher_class_leaves_the_floor_of_the_lower() -> None:
    gate = Gate(pool(20), line_limit=10_000, floors={0: 0.25})
    world = World(gate)
    high, low = Tenant("high", priority=1), Tenant("low", priority=0)
    for _ in range(60):
        world.ask(high, 1)
        world.ask(low, 1)
    world.run(2000)
    total = sum(world.used.values())
    assert world.used["low"] / total == pytest.approx(0.25, abs=0.03)


def test_a_class_without_a_floor_goes_last() -> None:
    gate = Gate(pool(20), line_limit=10_000)
    world = World(gate)
    for _ in range(60):
        world.ask(Tenant("high", priority=1), 1)
        world.ask(Tenant("low"), 1)
    world.run(50)
    world.used.clear()
    world.run(1000)
    assert world.used["low"] == 0


def test_a_tenant_at_its_ceiling_waits_without_keeping_others_waiting() -> None:
    gate = Gate(pool(20))
    bounded, free = Tenant("bounded", ceiling=4), Tenant("free")
    first = gate.ask(Ask((1,), 4, tenant=bounded), 0.0)
    assert isinstance(first, Granted)
    refused = gate.ask(Ask((1,), 1, tenant=bounded), 0.0)
    assert isinstance(refused, Refused)
    assert refused.reason is Reason.TENANT_LIMIT
    waits = gate.ask(Ask((1,), 2, tenant=bounded, max_wait=60), 0.0)
    assert isinstance(waits, Queued)
    others = gate.ask(Ask((1,), 10, tenant=free), 0.0)
    assert isinstance(others, Granted)
    assert gate.ended(others.key, Ending.COMPLETED, 1.0) == []
    assert [a.key for a in gate.ended(first.key, Ending.COMPLETED, 2.0)] == [waits.key]


def test_what_is_over_a_ceiling_by_itself_never_fits() -> None:
    answer = Gate(pool(20)).ask(Ask((1,), 5, tenant=Tenant("bounded", ceiling=4)), 0.0)
    assert isinstance(answer, Refused)
    assert answer.reason is Reason.KV_CAPACITY_EXCEEDED
    assert answer.retry_after is None
    assert answer.output_cap_that_fits == 4


def test_a_settled_reservation_is_charged_only_for_what_it_keeps() -> None:
    gate = Gate(pool(20))
    bounded = Tenant("bounded", ceiling=10)
    first = gate.ask(Ask((1,), 10, tenant=bounded), 0.0)
    assert isinstance(first, Granted)
    gate.settle(first.key, 6, 1.0)
    assert isinstance(gate.ask(Ask((1,), 4, tenant=bounded), 1.0), Granted)


def test_an_operator_may_change_a_tenant_while_it_waits() -> None:
    gate = Gate(pool(10), passes_max=0)
    key = granted(gate, Ask((1,), 10, tenant=Tenant("a")))
    waiting = queued(gate, Ask((1,), 3, tenant=Tenant("a"), max_wait=60))
    urgent = queued(gate, Ask((1,), 3, tenant=Tenant("b", priority=1), max_wait=60))
    third = queued(gate, Ask((1,), 3, tenant=Tenant("a", priority=2), max_wait=60))
    assert [a.key for a in gate.ended(key, Ending.COMPLETED, 1.0)] == [waiting, third, urgent]
    gate.line.shares.know(Tenant("a", priority=0))
    for each in (waiting, third, urgent):
        gate.ended(each, Ending.COMPLETED, 2.0)
    assert all(klass.held == 0 and klass.waiting == 0 for klass in gate.line.shares._classes.values())


def test_ceilings_that_follow_the_pool_let_in_or_turn_away_who_waits() -> None:
    gate = Gate(pool(100))
    first = granted(gate, Ask((1,), 40, tenant=Tenant("a", ceiling=50)))
    fits = queued(gate, Ask((1,), 30, tenant=Tenant("a", ceiling=50), max_wait=60))
    large = queued(gate, Ask((1,), 45, tenant=Tenant("a", ceiling=50), max_wait=60))
    assert gate.resize(pool(100), 1.0) == []

    # Half as much for a while: nobody is told "never", and nobody gets in.
    gate.line.shares.tell(lambda tenant: Tenant(tenant.name, ceiling=25, most_ceiling=50))
    assert gate.resize(pool(100), 2.0) == []
    assert gate.ended(first, Ending.COMPLETED, 3.0) == []
    held_back = gate.ask(Ask((1,), 40, tenant=Tenant("a", ceiling=25, most_ceiling=50)), 3.0)
    assert isinstance(held_back, Refused)
    assert held_back.reason is Reason.TENANT_LIMIT
    # More than before: the first of them fits.
    gate.line.shares.tell(lambda tenant: Tenant(tenant.name, ceiling=60))
    (let_in,) = gate.resize(pool(100), 4.0)
    assert let_in.key == fits
    # A smaller engine: what is above the ceiling for good is turned away with the figures of now.
    gate.line.shares.tell(lambda tenant: Tenant(tenant.name, ceiling=44))
    (never,) = gate.resize(pool(80), 5.0)
    assert isinstance(never, Refused)
    assert (never.key, never.reason, never.usable_tokens) == (large, Reason.KV_CAPACITY_EXCEEDED, 44)
