"""A pool of which much is held back: who is told to come back when, and who may pass whom meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvgate.core.correction import NOTHING
from kvgate.core.forecast import RETRY_MAX
from kvgate.core.gate import Gate
from kvgate.core.line import PASSES_MAX
from kvgate.core.records import Ask, Ending, Granted, PoolFacts, Queued, Reason, Refused, Tenant

FACTS = PoolFacts(1000, 1, 900, most_fraction=0.9)
HELD_BACK = replace(FACTS, safety_fraction=0.3)


def of(blocks: int, **more: object) -> Ask:
    """A request that needs so many blocks."""
    return Ask((1,), blocks, **more)  # type: ignore[arg-type]


def granted(gate: Gate, ask: Ask, now: float) -> int:
    given = gate.ask(ask, now)
    assert isinstance(given, Granted)
    return given.key


def refused(gate: Gate, ask: Ask, now: float) -> Refused:
    given = gate.ask(ask, now)
    assert isinstance(given, Refused)
    return given


def test_what_is_held_above_the_pool_has_to_end_before_there_is_room() -> None:
    gate = Gate(PoolFacts(2000, 1, 900, safety_fraction=1.0))
    for n in range(10):
        granted(gate, of(200), n * 0.3)  # expected to end at 4.0, 4.3, ... 6.7: blocks of 0.02 s each
    gate.resize(replace(gate.facts, safety_fraction=0.5, most_fraction=1.0), 3.0)
    assert (gate.ledger.headroom, gate.ledger.free_blocks) == (-1000, 0)

    # Six of them: five for what is held too much.
    assert refused(gate, of(200), 3.0).retry_after == pytest.approx(5.5 - 3.0)


@pytest.mark.parametrize(
    ("facts", "tenant", "reason"),
    [
        (replace(FACTS, safety_fraction=NOTHING), Tenant(), Reason.KV_CAPACITY),
        (HELD_BACK, Tenant(), Reason.KV_CAPACITY),
        (HELD_BACK, Tenant("half", ceiling=150, most_ceiling=450), Reason.TENANT_LIMIT),
    ],
)
def test_where_nothing_that_ends_makes_room_nobody_is_told_to_come_back_soon(
    facts: PoolFacts, tenant: Tenant, reason: Reason
) -> None:
    gate = Gate(facts)
    for draw in (0.0, 0.5, 0.99):
        given = refused(gate, of(400, tenant=tenant, draw=draw), 0.0)
        assert given.reason is reason
        assert given.retry_after == pytest.approx(RETRY_MAX * (0.75 + 0.25 * draw))
    # What fits beside it is told as ever.
    if facts.usable_blocks:
        granted(gate, of(250), 0.0)
        soon = refused(gate, of(100), 0.0).retry_after
        assert soon is not None
        assert soon < 10


def test_one_that_needs_more_than_is_left_over_keeps_nobody_from_the_rest() -> None:
    gate = Gate(HELD_BACK)
    large = gate.ask(of(400, max_wait=1000.0), 0.0)
    assert isinstance(large, Queued)

    small = [granted(gate, of(10, max_wait=1000.0), 1.0) for _ in range(30)]
    # Nor those who wait behind it.
    waiting = [gate.ask(of(10, max_wait=1000.0), 2.0) for _ in range(5)]
    assert all(isinstance(given, Queued) for given in waiting)
    let_in = [given.key for key in small[:5] for given in gate.ended(key, Ending.COMPLETED, 3.0)]
    assert let_in == [given.key for given in waiting if isinstance(given, Queued)]

    # As soon as it can have its room again, it is the first, and nobody passes it.
    assert gate.resize(replace(FACTS, safety_fraction=0.6), 4.0) == []
    assert isinstance(gate.ask(of(10, max_wait=1000.0), 4.0), Queued)
    (given,) = [given for key in small[5:15] for given in gate.ended(key, Ending.COMPLETED, 5.0)]
    assert isinstance(given, Granted)
    assert given.key == large.key


def test_nor_does_the_place_of_one_that_was_sent_away() -> None:
    gate = Gate(FACTS)
    first = granted(gate, of(900), 0.0)
    for tries in range(2):  # so that room is kept for it
        refused(gate, of(400, identity=7, tries=tries), float(tries))
    gate.resize(HELD_BACK, 1.0)
    gate.ended(first, Ending.CANCELLED, 1.0)
    assert gate.places.favoured(1.0) is not None

    # 0.02 s for each token of the cap: none is expected to be over when that one is back.
    for n in range(2 * PASSES_MAX):
        gate.ended(granted(gate, of(200, identity=100 + n), 1.0), Ending.CANCELLED, 1.0)
    assert gate.places.favoured(1.0) is not None
