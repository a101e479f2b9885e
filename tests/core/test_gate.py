"""The one decision: who is granted, who waits, who is refused and with which figures."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
from gates import granted, keys, of, pool, queued, refused
from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.gate import Gate
from kvgate.core.policy import unsafe_concurrency, unsafe_none, unsafe_prompt_only
from kvgate.core.records import Ask, CapRules, Ending, Granted, Key, PoolFacts, Queued, Reason, Refused


def state(gate: Gate) -> object:
    ledger, forecast = gate.ledger, gate.forecast
    return copy.deepcopy(
        (
            (ledger.reserved_blocks, ledger.reserved_seqs, list(ledger)),
            (ledger.double_releases, ledger._next),
            list(gate.line),
            gate.line.blocks,
            (forecast._live, forecast._promised, forecast.seconds_per_cap_token),
            (gate.admissions, gate.refusals, gate.releases),
        )
    )


def test_a_grant_reserves_what_the_request_may_reach() -> None:
    gate = Gate(pool())
    answer = gate.ask(Ask((3,), 5), 0.0)
    assert answer == Granted(1, blocks=7, sequences=1, output_cap=5, waited=0.0)
    assert gate.ledger.reserved_blocks == 7
    assert gate.admissions == 1


def test_of_500_that_arrive_at_once_exactly_the_ten_that_fit_are_granted() -> None:
    gate = Gate(pool(100))
    answers = [gate.ask(of(10), 0.0) for _ in range(500)]
    assert sum(isinstance(answer, Granted) for answer in answers) == 10
    assert gate.refusals == {Reason.KV_CAPACITY: 490}
    assert gate.ledger.reserved_blocks == 100


def test_a_second_ending_changes_nothing_and_is_counted() -> None:
    gate = Gate(pool())
    key, other = granted(gate, of(4)), granted(gate, of(4))
    gate.ended(key, Ending.COMPLETED, 1.0)
    before = gate.releases.copy()
    assert gate.ended(key, Ending.FAILED, 2.0) == []
    assert gate.ledger.double_releases == 1
    assert gate.releases == before == {Ending.COMPLETED: 1}
    assert list(gate.ledger) == [other]


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (Ask((1000,), 1, max_wait=60), Reason.CONTEXT_LENGTH_EXCEEDED),
        (Ask((1,), max_wait=60), Reason.KV_CAPACITY_EXCEEDED),
        (Ask((1,), 1, choices=11, max_wait=60), Reason.KV_CAPACITY_EXCEEDED),
    ],
)
def test_what_can_never_succeed_neither_waits_nor_is_told_to_come_back(ask: Ask, reason: Reason) -> None:
    gate = Gate(pool())
    answer = refused(gate, ask)
    assert (answer.reason, answer.retry_after, answer.key) == (reason, None, None)
    assert not gate.line


def test_a_never_refusal_names_the_cap_that_the_empty_pool_would_take() -> None:
    gate = Gate(pool())
    granted(gate, of(9))
    answer = refused(gate, Ask((4,)))
    assert answer.output_cap_that_fits == 7
    assert (answer.needed_tokens, answer.usable_tokens, answer.free_tokens) == (999, 10, 1)


def test_a_busy_refusal_teaches_what_was_reserved_and_what_would_fit() -> None:
    gate = Gate(PoolFacts(10, block_size=16, context=160, safety_fraction=1.0))
    granted(gate, Ask((1,), 64))
    answer = refused(gate, Ask((20,)))
    assert (answer.needed_tokens, answer.free_tokens, answer.usable_tokens) == (160, 96, 160)
    assert (answer.prompt_tokens, answer.context) == (20, 160)
    assert (answer.output_cap, answer.output_cap_was_set, answer.output_cap_that_fits) == (140, False, 77)
    assert isinstance(gate.explain(Ask((20,), 77), 0.0), Granted)
    assert isinstance(gate.explain(Ask((20,), 78), 0.0), Refused)


def test_behind_a_head_that_waits_for_a_sequence_no_cap_would_fit() -> None:
    gate = Gate(pool(100, seqs=2), passes_max=0)
    granted(gate, of(1))
    queued(gate, Ask((1,), 1, choices=2, max_wait=60))
    assert refused(gate, of(50)).output_cap_that_fits is None


def test_a_shrink_keeps_the_granted_and_grants_nobody_until_it_fits() -> None:
    gate = Gate(pool())
    key, other = granted(gate, of(5)), granted(gate, of(5))
    waiting = queued(gate, of(3, wait=60))
    assert gate.resize(pool(6), 1.0) == []
    assert gate.ledger.reserved_blocks == 10
    assert refused(gate, of(1)).reason is Reason.KV_CAPACITY
    assert gate.ended(key, Ending.COMPLETED, 2.0) == []
    assert keys(gate.ended(other, Ending.COMPLETED, 3.0)) == [waiting]


def test_refusals_decided_elsewhere_are_counted_with_the_others() -> None:
    gate = Gate(pool())
    gate.refused(Reason.DRAINING)
    assert gate.refusals == {Reason.DRAINING: 1}


@pytest.mark.parametrize("policy", [unsafe_none, unsafe_concurrency, unsafe_prompt_only])
def test_the_unsafe_policies_admit_what_the_worst_case_would_not(policy: object) -> None:
    gate = Gate(pool(10, seqs=8))
    gate.policy = policy  # type: ignore[assignment]  # mypy takes a function for a method
    assert [type(gate.ask(of(10), 0.0)) for _ in range(5)] == [Granted] * 5


asks = st.builds(
    Ask,
    prompts=st.lists(st.integers(1, 12), min_size=1, max_size=2).map(tuple),
    output_cap=st.none() | st.integers(1, 12),
    choices=st.integers(1, 2),
    rules=st.just(CapRules(ceiling=9)),
    max_wait=st.sampled_from([0.0, 3.0, 20.0]),
    draw=st.floats(0, 1, exclude_max=True),
)


@given(st.lists(asks, max_size=20), asks)
@pytest.mark.as_python
def test_explain_says_what_ask_would_and_changes_nothing(before: list[Ask], ask: Ask) -> None:
    gate = Gate(pool(30, seqs=5, context=12))
    for step, each in enumerate(before):
        gate.ask(each, float(step))
    now = float(len(before))
    unchanged = state(gate)
    explained = gate.explain(ask, now)
    assert state(gate) == unchanged
    answer = gate.ask(ask, now)
    assert isinstance(explained, Granted) == isinstance(answer, Granted)
    if isinstance(explained, Refused) and isinstance(answer, Refused) and answer.reason is explained.reason:
        assert explained.retry_after is None
        assert explained.output_cap_that_fits == answer.output_cap_that_fits
        assert explained.needed_tokens == answer.needed_tokens


@given(
    st.lists(st.one_of(asks, st.tuples(st.integers(0, 9), st.sampled_from(list(Ending))), st.just("tick")))
)
def test_nobody_who_was_granted_is_refused_later_and_everybody_is_answered_once(moves: list[object]) -> None:
    gate = Gate(pool(30, seqs=5, context=12))
    answered: set[Key] = set()
    waiting: list[Key] = []
    running: list[Key] = []

    def take(answers: Iterable[Granted | Refused]) -> None:
        for answer in answers:
            assert answer.key is not None
            assert answer.key not in answered
            answered.add(answer.key)
            waiting.remove(answer.key)
            if isinstance(answer, Granted):
                running.append(answer.key)

    for now, move in enumerate(moves):
        if isinstance(move, Ask):
            answer = gate.ask(move, float(now))
            if isinstance(answer, Queued):
                waiting.append(answer.key)
            elif isinstance(answer, Granted):
                answered.add(answer.key)
                running.append(answer.key)
        elif isinstance(move, tuple) and (running or waiting):
            everybody = running + waiting
            key = everybody[move[0] % len(everybody)]
            (running if key in running else waiting).remove(key)
            take(gate.ended(key, move[1], float(now)))
        else:
            take(gate.tick(float(now)))
        assert list(gate.ledger) == sorted(running, key=list(gate.ledger).index)
        assert [waiter.key for waiter in gate.line] == waiting
