"""A tenant's own newcomers pass one of its requests that waits for the ceiling only so often."""

from __future__ import annotations

from gates import pool

from kvgate.core.gate import Gate
from kvgate.core.line import PASSES_MAX
from kvgate.core.records import Ask, Ending, Granted, Queued, Tenant

ACME = Tenant("acme", ceiling=10)


def test_small_newcomers_do_not_starve_a_large_one_below_a_ceiling() -> None:
    gate = Gate(pool(100))
    live = [gate.ask(Ask((1,), 2, tenant=ACME), 0.0) for _ in range(4)]
    large = gate.ask(Ask((1,), 8, tenant=ACME, max_wait=1e6), 0.0)
    assert isinstance(large, Queued)
    passed = 0
    for step in range(1, 100):
        first = live.pop(0)
        assert isinstance(first, Granted)
        answers = gate.ended(first.key, Ending.COMPLETED, float(step))
        if any(answer.key == large.key for answer in answers):
            break
        newcomer = gate.ask(Ask((1,), 2, tenant=ACME), float(step))
        if isinstance(newcomer, Granted):
            live.append(newcomer)
            passed += 1
    assert passed == PASSES_MAX
    assert step <= PASSES_MAX + 4


def test_another_tenant_is_not_held_up_by_a_ceiling_that_is_not_its_own() -> None:
    gate = Gate(pool(100))
    assert isinstance(gate.ask(Ask((1,), 10, tenant=ACME), 0.0), Granted)
    assert isinstance(gate.ask(Ask((1,), 10, tenant=ACME, max_wait=1e6), 0.0), Queued)
    for _ in range(3 * PASSES_MAX):
        assert isinstance(gate.ask(Ask((1,), 1, tenant=Tenant("other")), 1.0), Granted)
