"""Who waits, in which order they are let in, and how a place is left."""

from __future__ import annotations

from gates import granted, keys, of, pool, queued, refused

from kvgate.core.gate import Gate
from kvgate.core.line import PASSES_MAX
from kvgate.core.records import Ending, Granted, Reason, Refused


def test_the_line_is_first_come_first_served() -> None:
    gate = Gate(pool())
    first = granted(gate, of(10))
    waiting = [queued(gate, of(4, wait=60)) for _ in range(4)]
    assert keys(gate.ended(first, Ending.COMPLETED, 1.0)) == waiting[:2]
    assert keys(gate.ended(waiting[0], Ending.COMPLETED, 2.0)) == waiting[2:3]
    assert keys(gate.ended(waiting[1], Ending.COMPLETED, 3.0)) == waiting[3:]


def test_small_ones_fill_the_gap_before_a_large_one_a_bounded_number_of_times() -> None:
    gate = Gate(pool())
    small = granted(gate, of(5))
    large = queued(gate, of(10, wait=60))
    for _ in range(PASSES_MAX):
        gate.ended(granted(gate, of(1)), Ending.COMPLETED, 0.0)
    answer = refused(gate, of(1))
    assert (answer.reason, answer.output_cap_that_fits) == (Reason.KV_CAPACITY, None)
    later = queued(gate, of(1, wait=60))
    assert keys(gate.ended(small, Ending.COMPLETED, 1.0)) == [large]
    assert keys(gate.ended(large, Ending.COMPLETED, 2.0)) == [later]


def test_a_large_head_is_served_although_small_ones_keep_coming() -> None:
    gate = Gate(pool())
    running = [granted(gate, of(1)) for _ in range(10)]
    large = queued(gate, of(10, wait=600))
    passed = 0
    for step in range(1, 600):
        answer = gate.ask(of(1, wait=600), float(step))
        if isinstance(answer, Granted):
            running.append(answer.key)
        answers = keys(gate.ended(running.pop(0), Ending.COMPLETED, float(step)))
        if large in answers:
            break
        passed += len(answers)
        running += [key for key in answers if key is not None]
    assert large in answers
    assert passed == PASSES_MAX
    assert step == 10 + PASSES_MAX


def test_the_time_waited_is_told() -> None:
    gate = Gate(pool())
    first = granted(gate, of(10))
    queued(gate, of(10, wait=60), now=5.0)
    (answer,) = gate.ended(first, Ending.COMPLETED, 12.5)
    assert isinstance(answer, Granted)
    assert answer.waited == 7.5


def test_who_waits_until_the_deadline_is_refused_then_and_not_before() -> None:
    gate = Gate(pool())
    granted(gate, of(10))
    assert gate.wake_at() is None
    key = queued(gate, of(2, wait=5), now=1.0)
    queued(gate, of(2, wait=50), now=1.0)
    assert gate.wake_at() == 6.0
    assert gate.tick(5.99) == []
    (answer,) = gate.tick(6.0)
    assert isinstance(answer, Refused)
    assert (answer.reason, answer.key) == (Reason.QUEUE_TIMEOUT, key)
    assert answer.retry_after is not None
    assert gate.wake_at() == 51.0
    assert gate.tick(6.0) == []


def test_a_head_that_gives_up_lets_the_next_in() -> None:
    gate = Gate(pool(), passes_max=0)
    granted(gate, of(5))
    queued(gate, of(10, wait=5))
    small = queued(gate, of(2, wait=50))
    answers = gate.tick(5.0)
    assert [type(answer) for answer in answers] == [Refused, Granted]
    assert answers[1].key == small


def test_a_cancel_in_the_line_passes_the_place_on() -> None:
    gate = Gate(pool(), passes_max=0)
    granted(gate, of(5))
    large = queued(gate, of(10, wait=60))
    small = queued(gate, of(5, wait=60))
    assert keys(gate.ended(large, Ending.CANCELLED, 1.0)) == [small]
    assert gate.releases == {}
    assert gate.ledger.double_releases == 0


def test_a_place_in_the_line_is_left_once() -> None:
    gate = Gate(pool())
    granted(gate, of(10))
    key = queued(gate, of(1, wait=60))
    gate.ended(key, Ending.CANCELLED, 1.0)
    assert gate.ended(key, Ending.CANCELLED, 1.0) == []
    assert gate.ledger.double_releases == 1


def test_a_full_line_refuses_and_those_in_it_stay() -> None:
    gate = Gate(pool(), line_limit=2)
    first = granted(gate, of(10))
    waiting = [queued(gate, of(1, wait=60)) for _ in range(2)]
    answer = refused(gate, of(1, wait=60))
    assert answer.reason is Reason.QUEUE_FULL
    assert answer.retry_after is not None
    assert keys(gate.ended(first, Ending.COMPLETED, 1.0)) == waiting


def test_a_growth_lets_the_line_in() -> None:
    gate = Gate(pool())
    granted(gate, of(10))
    waiting = [queued(gate, of(4, wait=60)) for _ in range(3)]
    assert keys(gate.resize(pool(18), 1.0)) == waiting[:2]


def test_who_waits_for_what_the_engine_no_longer_has_is_told_never() -> None:
    gate = Gate(pool(), passes_max=0)
    granted(gate, of(3))
    large = queued(gate, of(10, wait=60))
    small = queued(gate, of(1, wait=60))
    never, next_in = gate.resize(pool(5), 1.0)
    assert isinstance(never, Refused)
    assert (never.reason, never.key, never.retry_after) == (Reason.KV_CAPACITY_EXCEEDED, large, None)
    assert isinstance(next_in, Granted)
    assert next_in.key == small


def test_an_exact_count_gives_the_rest_to_the_line() -> None:
    gate = Gate(pool())
    key = granted(gate, of(10))
    waiting = queued(gate, of(3, wait=60))
    assert gate.settle(key, 8, 1.0) == []
    assert keys(gate.settle(key, 7, 1.0)) == [waiting]
    assert gate.ledger.held(key) == 7
