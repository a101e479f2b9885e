"""What is let in on a bound takes nothing from others, gets the cap of its count, and gives the rest back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gates import of, pool, queued
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgate.core.bound_first import is_easy, settled_blocks
from kvgate.core.gate import Gate
from kvgate.core.ledger import NotHeld
from kvgate.core.policy import unsafe_none
from kvgate.core.price import price
from kvgate.core.records import Ask, CapRules, Ending, Granted, Key, PoolFacts, Price, Tenant

FACTS = pool(total=100, context=60)
BOUND = Ask((20,), 10)  # 29 blocks


def test_a_bound_is_enough_where_it_leaves_as_much_as_it_takes() -> None:
    gate = Gate(FACTS)
    assert is_easy(gate, BOUND)

    gate.ask(of(42), 0.0)
    assert is_easy(gate, BOUND)
    gate.ask(of(1), 0.0)
    assert not is_easy(gate, BOUND)


def test_nobody_who_waits_is_passed_on_a_bound() -> None:
    gate = Gate(pool(total=100, context=200))
    gate.ask(of(10), 0.0)
    queued(gate, of(95, wait=5.0))

    assert not is_easy(gate, BOUND)


def test_nobody_who_was_told_to_come_back_is_passed_on_a_bound() -> None:
    gate = Gate(pool(total=100, context=200))
    gate.ask(of(10), 0.0)
    gate.ask(replace(of(95), identity=7), 0.0)

    assert len(gate.line) == 0
    assert not is_easy(gate, BOUND)


@pytest.mark.parametrize(
    ("ask", "is_enough"),
    [
        (Ask((20,)), False),  # the rest of the context, which a bound makes less
        (Ask((20,), rules=CapRules(default=10)), True),
        (Ask((20,), rules=CapRules(ceiling=10)), True),
        (Ask((50,), 10), False),  # 59 blocks are more than half
        (Ask((51,), 10), False),  # beyond the context: the cap would be cut
        (Ask((51, 1), 10), False),
        (Ask((5, 5), 10, choices=2), False),  # 4 x 14
        (Ask((5, 5), 10), True),
    ],
)
def test_its_cap_must_not_depend_on_the_count(ask: Ask, is_enough: bool) -> None:
    assert is_easy(Gate(FACTS), ask) is is_enough


def test_a_tenants_own_limit_is_what_has_to_be_left() -> None:
    gate, tenant = Gate(FACTS), Tenant("a", ceiling=60)
    assert is_easy(gate, replace(BOUND, tenant=tenant))

    gate.ask(replace(of(3), tenant=tenant), 0.0)

    assert not is_easy(gate, replace(BOUND, tenant=tenant))
    assert is_easy(gate, BOUND)


def test_what_comes_free_goes_to_those_who_wait() -> None:
    gate = Gate(pool(total=100, context=200))
    first = gate.at_once(BOUND, 0.0)
    assert first is not None
    waiting = queued(gate, of(80, wait=5.0))

    blocks = settled_blocks(gate, BOUND, (5,), first.blocks, FACTS)
    answers = gate.settle(first.key, blocks, 1.0)

    assert (first.blocks, blocks) == (29, 14)
    assert [answer.key for answer in answers] == [waiting]
    assert gate.ledger.reserved_blocks == 94


def test_a_correction_after_the_end_changes_nothing() -> None:
    gate = Gate(FACTS)
    given = gate.at_once(BOUND, 0.0)
    assert given is not None
    gate.ended(given.key, Ending.COMPLETED, 1.0)

    with pytest.raises(NotHeld):
        gate.settle(given.key, 1, 2.0)

    assert gate.ledger.reserved_blocks == 0
    assert sum(gate.releases.values()) == 1
    assert gate.line.shares.held() == {}


def test_a_policy_that_charges_nothing_is_corrected_to_nothing() -> None:
    gate = Gate(FACTS, policy=unsafe_none)
    given = gate.at_once(BOUND, 0.0)
    assert given is not None

    assert settled_blocks(gate, BOUND, (5,), given.blocks, FACTS) == 0


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_tenant_is_charged_for_what_it_held_after_the_correction(share: float) -> None:
    gate, tenant = Gate(FACTS), Tenant("a")
    ask = replace(BOUND, tenant=tenant)
    given = gate.at_once(ask, 0.0)
    assert given is not None
    account = gate.line.shares.account(tenant)
    expected = account.charged
    blocks = int(given.blocks * share)

    gate.settle(given.key, blocks, 2.0)
    assert account.charged == pytest.approx(expected * blocks / given.blocks)
    assert account.held == blocks
    gate.ended(given.key, Ending.COMPLETED, 10.0)

    assert account.charged == pytest.approx(10.0 * blocks)
    assert account.held == 0


PROMPTS = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(
        st.tuples(
            PROMPTS,
            st.one_of(st.none(), st.integers(1, 30)),
            st.integers(1, 2),
            st.floats(0, 1),
            st.permutations(["settle", "end"]),
        ),
        max_size=12,
    ),
    st.sampled_from([1, 4, 16]),
    st.data(),
)
def test_the_books_add_up_in_any_order_of_corrections_and_ends(
    wanted: list[tuple[tuple[int, ...], int | None, int, float, list[str]]], size: int, data: st.DataObject
) -> None:
    facts = PoolFacts(60 * 4 // size, size, 60, safety_fraction=1.0)
    gate = Gate(facts)
    live: dict[Key, tuple[Ask, Granted, tuple[int, ...], list[str]]] = {}
    held: dict[Key, int] = {}
    admitted = 0

    def step() -> None:
        key = data.draw(st.sampled_from(sorted(live)))
        ask, given, exact, todo = live[key]
        if todo.pop(0) == "settle":
            if key not in held:
                with pytest.raises(NotHeld):
                    gate.settle(key, 0, 1.0)
            else:
                blocks = settled_blocks(gate, ask, exact, given.blocks, facts)
                counted = price(replace(ask, prompts=exact), facts)
                assert isinstance(counted, Price)
                assert (counted.blocks, counted.output_cap) == (blocks, given.output_cap)
                gate.settle(key, blocks, 1.0)
                held[key] = blocks
        else:
            assert gate.ended(key, Ending.COMPLETED, 2.0) == []
            del held[key]
        if not todo:
            del live[key]

    for bound, cap, choices, share, order in wanted:
        ask = Ask(bound, cap, choices=choices)
        if is_easy(gate, ask):
            given = gate.at_once(ask, 0.0)
            assert given is not None
            assert given.output_cap == cap
            assert 2 * given.blocks <= facts.usable_blocks - sum(held.values())
            exact = tuple(max(1, int(prompt * share)) for prompt in bound)
            live[given.key], held[given.key] = (ask, given, exact, order), given.blocks
            admitted += 1
        if live and data.draw(st.booleans()):
            step()
        gate.ledger.recount()
        assert gate.ledger.reserved_blocks == sum(held.values()) == sum(gate.line.shares.held().values())
        assert gate.ledger.reserved_blocks <= facts.usable_blocks
    while live:
        step()
    gate.ledger.recount()
    assert gate.ledger.reserved_blocks == 0
    assert sum(gate.releases.values()) == gate.admissions == admitted
    assert gate.ledger.double_releases == 0
