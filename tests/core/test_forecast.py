"""When a refused client may come back: not before its estimate, not all at once, within limits."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.forecast import (
    COLD_LIFE_MAX,
    OVERDUE_SHARE,
    PROMISE_GAP,
    RETRY_MAX,
    RETRY_MIN,
    SECONDS_PER_TOKEN_COLD,
    Forecast,
)
from kvgate.core.gate import Gate
from kvgate.core.records import Ask, Ending, Granted, PoolFacts, Refused


def forecast_of(*live: tuple[float, int, int]) -> Forecast:
    """Reservations as (started, output cap, blocks), at 1 s a token so that figures are plain."""
    forecast = Forecast()
    forecast.started(-1, 1, 0, 0.0)
    forecast.ended(-1, 1.0, learn=True)
    assert forecast.seconds_per_cap_token == 1.0
    for key, (started, cap, blocks) in enumerate(live):
        forecast.started(key, cap, blocks, started)
    return forecast


def test_room_comes_when_enough_of_the_live_have_ended() -> None:
    forecast = forecast_of((0.0, 30, 4), (0.0, 10, 2), (5.0, 15, 1))
    assert [forecast.room_in(blocks, now=5.0) for blocks in (1, 2, 3, 4, 7)] == [5, 5, 15, 25, 25]


def test_an_answer_that_is_overdue_is_expected_to_last_for_a_share_of_its_age() -> None:
    assert forecast_of((0.0, 10, 4)).room_in(4, now=50.0) == 50.0 * OVERDUE_SHARE


def test_an_overdue_answer_does_not_hide_one_that_ends_sooner() -> None:
    assert forecast_of((0.0, 10, 4), (0.0, 51, 4)).room_in(4, now=50.0) == 1.0


def test_the_first_completed_answer_replaces_the_guess() -> None:
    forecast = Forecast()
    forecast.started(1, 100, 1, now=0.0)
    forecast.ended(1, 30.0, learn=True)
    assert forecast.seconds_per_cap_token == pytest.approx(0.3)


def test_a_client_that_was_refused_again_after_its_moment_counts_once() -> None:
    forecast = forecast_of((0.0, 1000, 10))
    first = [forecast.slot(5, 5, now=0.0, draw=0.0) for _ in range(40)]
    later = forecast.slot(5, 5, now=999.5, draw=0.0)
    assert max(first) == 45.0
    assert later == RETRY_MIN


def test_nothing_live_means_no_wait_and_more_than_is_live_means_later_rounds() -> None:
    assert forecast_of().room_in(3, now=1.0) == 0.0
    assert [forecast_of((0.0, 10, 4)).room_in(n, now=1.0) for n in (4, 5, 8, 9)] == [9.0, 18.0, 18.0, 27.0]


def test_what_has_ended_is_no_longer_expected() -> None:
    forecast = forecast_of((0.0, 10, 4), (0.0, 20, 4))
    assert forecast.room_in(1, now=0.0) == 10.0
    forecast.ended(0, 1.0, learn=False)
    assert forecast.room_in(1, now=0.0) == 20.0
    forecast.ended(0, 1.0, learn=True)
    assert forecast.seconds_per_cap_token == 1.0


def test_what_was_settled_frees_only_what_it_still_holds() -> None:
    forecast = forecast_of((0.0, 10, 4), (0.0, 20, 4))
    forecast.settled(0, 1)
    assert [forecast.room_in(blocks, now=0.0) for blocks in (1, 2)] == [10.0, 20.0]


def test_completed_answers_teach_how_long_a_token_takes() -> None:
    forecast = Forecast()
    for key in range(200):
        forecast.started(key, 100, 1, now=float(key))
        forecast.ended(key, now=key + 5.0, learn=True)
    assert forecast.seconds_per_cap_token == pytest.approx(0.05, rel=0.01)


@pytest.mark.parametrize("ending", [Ending.CANCELLED, Ending.FAILED, Ending.EXPIRED])
def test_an_answer_that_was_cut_short_teaches_nothing(ending: Ending) -> None:
    gate = Gate(PoolFacts(100, 1, 100, safety_fraction=1.0))
    granted = gate.ask(Ask((1,), 50), now=0.0)
    assert isinstance(granted, Granted)
    gate.ended(granted.key, ending, now=0.001)
    assert gate.forecast.seconds_per_cap_token == SECONDS_PER_TOKEN_COLD


def test_before_the_first_answer_a_large_cap_sends_nobody_away_for_minutes() -> None:
    forecast = Forecast()
    forecast.started(1, 32_000, 10, now=0.0)
    assert forecast.slot(10, 10, now=0.0, draw=0.0) == COLD_LIFE_MAX
    # One that has grown old is expected to grow older.
    assert forecast.room_in(10, now=40.0) == 40.0 * OVERDUE_SHARE


def test_a_late_moment_promised_on_a_wrong_guess_does_not_send_others_behind_it() -> None:
    forecast = Forecast()
    forecast.started(1, 400, 10, now=0.0)
    late = [forecast.slot(10, 10, now=0.0, draw=0.0) for _ in range(10)]
    assert late == pytest.approx([COLD_LIFE_MAX * n for n in range(1, 11)])
    forecast.ended(1, 0.5, learn=True)
    forecast.started(2, 400, 10, now=0.5)
    waits = [forecast.slot(10, 10, now=0.5, draw=0.0) for _ in range(12)]
    # One each half second from 1 s on, except where somebody was promised the room before.
    assert waits[2:6] == pytest.approx([1.5, 2.0, 2.5, 3.0])
    assert max(waits) < 12 / 2 + len(late)
    assert waits == sorted(set(waits))


def test_what_is_told_does_not_depend_on_what_was_asked_before_and_has_changed() -> None:
    """The sums that are kept between questions are those that a new forecast would make."""
    rng = random.Random(5)
    kept, live = Forecast(), dict[int, tuple[float, int]]()
    now = 0.0
    for key in range(400):
        now += rng.random()
        if live and rng.random() < 0.5:
            kept.ended(ended := rng.choice(list(live)), now, learn=False)
            del live[ended]
        elif live and rng.random() < 0.3:
            settled = rng.choice(list(live))
            live[settled] = live[settled][0], live[settled][1] // 2
            kept.settled(settled, live[settled][1])
        else:
            kept.started(key, 4000, blocks := rng.randrange(1, 50), now)
            live[key] = now, blocks
        asked = rng.randrange(1, 300)
        fresh = Forecast()
        for other, (start, blocks) in live.items():
            fresh.started(other, 4000, blocks, start)
        # Those that are overdue are expected anew when they are looked at, and so are not compared.
        if all(start + COLD_LIFE_MAX > now for start, _ in live.values()):
            assert kept.room_in(asked, now) == fresh.room_in(asked, now)


lives = st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5000), st.integers(0, 100)), max_size=10)


@given(lives, st.integers(1, 300), st.floats(100, 200), st.floats(0, 1, exclude_max=True))
def test_a_slot_is_within_the_limits_and_never_before_its_estimate(
    live: list[tuple[float, int, int]], blocks: int, now: float, draw: float
) -> None:
    forecast = forecast_of(*live)
    room = forecast.room_in(blocks, now)
    for _ in range(5):
        wait = forecast.slot(blocks, blocks, now, draw)
        assert RETRY_MIN <= wait <= RETRY_MAX
        # Nothing later than the longest wait can be said; then the last quarter of it is used.
        # The small term is binary rounding: (now + room) - now.
        assert wait >= (room if room < RETRY_MAX else 0.75 * RETRY_MAX) - 1e-9


@pytest.mark.parametrize("cap", [5, 50, 500, 2_500, 20_000])
@pytest.mark.parametrize("cost", [1, 40])
def test_a_herd_of_200_is_told_200_distinct_moments(cap: int, cost: int) -> None:
    rng = random.Random(cap)
    gate = Gate(PoolFacts(40, 16, 40_000, safety_fraction=1.0))
    gate.policy = lambda ask, price, facts: (cost, 1)
    gate.forecast.started(0, cap, 40, 0.0)
    assert gate.ledger.reserve(40) is not None
    waits = []
    for _ in range(200):
        answer = gate.ask(Ask((1,), cost * 16, draw=rng.random()), now=0.0)
        assert isinstance(answer, Refused)
        assert answer.retry_after is not None
        assert 1.0 <= answer.retry_after <= 60.0
        waits.append(answer.retry_after)
    assert len(set(waits)) == 200


def test_the_slots_of_a_herd_follow_each_other_at_the_rate_at_which_room_comes() -> None:
    forecast = forecast_of((0.0, 10, 10))
    waits = [forecast.slot(10, 10, 0.0, draw=0.0) for _ in range(5)]
    assert waits == [10.0, 20.0, 30.0, 40.0, 50.0]


def test_clients_for_whom_room_comes_at_once_still_come_one_after_the_other() -> None:
    forecast = forecast_of((0.0, 20, 10))
    waits = [forecast.slot(2, 2, 0.0, draw=0.0) for _ in range(5)]
    assert waits == pytest.approx([20.0 + n * PROMISE_GAP for n in range(5)])


def test_a_herd_at_the_edge_of_the_longest_wait_is_still_distinct() -> None:
    rng = random.Random(1)
    forecast = forecast_of((0.0, 58, 400))
    waits = [forecast.slot(1, 1, 0.0, rng.random()) for _ in range(200)]
    assert len(set(waits)) == 200
    assert all(58.0 <= wait < 60.0 for wait in waits)


def test_one_large_refusal_does_not_push_the_others_out_for_hours() -> None:
    forecast = forecast_of((0.0, 1000, 1))  # one block for 1,000 s, while 40 blocks are asked
    forecast.slot(40, 1, 995.0, draw=0.0)
    forecast.ended(0, 1000.0, learn=False)
    assert forecast.slot(1, 1, 1056.0, draw=0.0) == RETRY_MIN
