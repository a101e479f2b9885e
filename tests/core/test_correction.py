"""How much may be reserved, corrected by what the engine shows: down at once, up slowly, never blindly."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.correction import (
    FLOOR,
    LOOKS_TO_BELIEVE,
    PACE_FIRST,
    PACE_LONGEST,
    STALE,
    STEP_DOWN,
    STEP_UP,
    Correction,
    Look,
)
from kvgate.core.records import Misuse

TOTAL = 1000


def look(
    now: float, reserved: int = 850, used: int | None = 600, preemptions: int | None = 0, total: int = TOTAL
) -> Look:
    return Look(now, reserved, total, used, preemptions)


def test_auto_rises_to_the_whole_pool_while_it_is_full_and_nothing_is_preempted() -> None:
    auto = Correction(0.90, ceiling=1.0)
    seconds = next(n for n in itertools.count() if auto.look(look(n * 3.0, reserved=900)) > 0.9999)

    assert seconds * 3.0 < 70
    assert auto.fraction == 1.0


def test_a_fixed_fraction_never_rises_above_what_the_operator_said() -> None:
    fixed = Correction(0.80)

    assert {fixed.look(look(n * 10.0, reserved=799)) for n in range(100)} == {0.80}


def test_a_pool_that_is_hardly_used_teaches_nothing() -> None:
    auto = Correction(0.90, ceiling=1.0)

    assert {auto.look(look(n * 10.0, reserved=500, used=400)) for n in range(100)} == {0.90}


def test_a_page_that_shows_an_empty_pool_under_load_is_not_believed() -> None:
    auto = Correction(0.90, ceiling=1.0)

    assert {auto.look(look(n * 10.0, reserved=900, used=0)) for n in range(100)} == {0.90}


def test_one_preemption_steps_down_at_once_and_recovery_is_slow() -> None:
    auto = Correction(0.90, ceiling=1.0)
    auto.look(look(0.0, reserved=0, used=0))

    assert auto.look(look(3.0, reserved=0, used=0, preemptions=1)) == pytest.approx(0.90 - STEP_DOWN)
    low = auto.fraction
    assert auto.look(look(3.0 + PACE_FIRST, reserved=0, used=0, preemptions=1)) == low  # the pace has doubled
    assert auto.look(look(3.1 + 2 * PACE_FIRST, reserved=0, used=0, preemptions=1)) == pytest.approx(
        low + STEP_UP
    )


def test_each_step_down_doubles_the_time_to_the_next_step_up() -> None:
    auto = Correction(0.90, ceiling=1.0)
    for count in range(20):
        auto.look(look(count * 3.0, reserved=0, used=0, preemptions=count))

    assert auto.pace == PACE_LONGEST
    assert auto.fraction == FLOOR


def test_use_beyond_the_ledger_is_believed_the_second_time_and_taken_off() -> None:
    fixed = Correction(0.90)

    assert fixed.look(look(0.0, reserved=300, used=500)) == 0.90
    assert fixed.excess == 200
    assert fixed.look(look(3.0, reserved=300, used=500)) == pytest.approx(0.70)
    assert fixed.overuses == 1
    # It is not taken off again and again while it stays.
    assert fixed.look(look(6.0, reserved=300, used=500)) == pytest.approx(0.70)
    assert LOOKS_TO_BELIEVE == 2


def test_a_foreign_client_that_stays_for_long_is_one_event_and_its_room_comes_back() -> None:
    fixed = Correction(0.90)
    for n in range(200):
        fixed.look(look(n * 3.0, reserved=300, used=500))
    assert (fixed.fraction, fixed.pace) == (pytest.approx(0.70), 2 * PACE_FIRST)

    seconds = next(
        n * 3.0 for n in range(200, 400) if fixed.look(look(n * 3.0, reserved=300, used=300)) >= 0.9
    )
    assert seconds - 600.0 < 240.0
    assert fixed.pace < 2 * PACE_FIRST


def test_a_release_between_ledger_and_engine_is_not_use_by_somebody_else() -> None:
    fixed = Correction(0.90)
    looks = [look(n * 3.0, reserved=0, used=400 * (n % 2)) for n in range(40)]

    assert {fixed.look(each) for each in looks} == {0.90}


def test_what_is_reserved_does_not_hold_the_fraction_up() -> None:
    fixed = Correction(0.90)
    fixed.look(look(0.0, reserved=890))

    # A busy pool is as full at every look: it would stay so.
    assert fixed.look(look(3.0, reserved=890, preemptions=5)) == pytest.approx(0.85)
    assert fixed.look(look(6.0, reserved=880, preemptions=6)) == pytest.approx(0.80)


def test_an_engine_that_has_started_anew_has_not_preempted() -> None:
    fixed = Correction(0.90)
    fixed.look(look(0.0, preemptions=500))

    assert fixed.look(look(3.0, preemptions=0)) == 0.90
    assert fixed.preemptions == 0
    assert fixed.look(look(6.0, reserved=0, used=0, preemptions=2)) < 0.90


def test_preemptions_before_the_first_look_are_not_ours() -> None:
    assert Correction(0.90).look(look(0.0, preemptions=31)) == 0.90


def test_missing_figures_neither_halt_nor_over_admit() -> None:
    auto = Correction(0.90, ceiling=1.0)
    for n in range(100):
        auto.look(look(n * 3.0, reserved=950))
    assert auto.fraction == 1.0

    assert auto.look(look(301.0, used=None, preemptions=None)) == 1.0
    assert auto.blind(297.0 + STALE) == 0.90
    assert auto.blind(10_000.0) == 0.90
    # What was learned of a danger stays, too.
    fixed = Correction(0.90)
    fixed.look(look(0.0))
    fixed.look(look(1.0, reserved=0, used=0, preemptions=1))
    assert fixed.blind(9_999.0) == pytest.approx(0.85)


def test_a_fraction_that_makes_no_sense_is_a_misuse() -> None:
    for start, ceiling in ((0.0, 1.0), (0.9, 0.8), (0.9, 1.1)):
        with pytest.raises(Misuse):
            Correction(start, ceiling)


LOOKS = st.lists(
    st.tuples(
        st.floats(0.01, 120.0),
        st.integers(0, 1200),
        st.none() | st.integers(0, 2000),
        st.none() | st.integers(0, 5),
    ),
    max_size=60,
)


@given(LOOKS, st.sampled_from([0.2, 0.5, 0.9, 1.0]), st.booleans())
def test_whatever_is_seen_the_fraction_keeps_its_bounds(
    seen: list[tuple[float, int, int | None, int | None]], start: float, is_auto: bool
) -> None:
    kept = Correction(start, 1.0 if is_auto else start)
    now, counter, before = 0.0, 0, kept.fraction
    for pause, reserved, used, more in seen:
        now += pause
        counter = counter + more if more is not None else counter
        fraction = kept.look(Look(now, reserved, TOTAL, used, None if more is None else counter))

        assert min(FLOOR, start) <= fraction <= kept.ceiling
        # It rises in small steps.
        assert fraction <= before + STEP_UP + 1e-9
        before = fraction


@given(LOOKS)
def test_no_use_below_the_ledger_without_preemptions_ever_lowers_it(
    seen: list[tuple[float, int, int | None, int | None]],
) -> None:
    kept, now = Correction(0.90, 1.0), 0.0
    for pause, reserved, used, _ in seen:
        now += pause
        kept.look(Look(now, reserved, TOTAL, None if used is None else min(used, reserved), 7))
        assert kept.fraction >= 0.90


@pytest.mark.parametrize("too_low", [1.05, 1.1, 1.25, 1.5])
@pytest.mark.parametrize("seed", range(5))
def test_behind_a_price_that_is_too_low_the_pool_settles_where_nothing_is_preempted(
    too_low: float, seed: int
) -> None:
    """Always full, but for what the next request does not fit into: the fraction follows that down."""
    dice, auto, preemptions, last = random.Random(seed), Correction(0.90, ceiling=1.0), 0, 0.0
    for n in range(2000):
        reserved = int(auto.fraction * TOTAL) - dice.randint(0, 40)
        wanted = int(reserved * too_low)
        if wanted > TOTAL:
            preemptions, last = preemptions + 1, n * 3.0
        auto.look(Look(n * 3.0, reserved, TOTAL, min(wanted, TOTAL), preemptions))

    assert auto.fraction * too_low <= 1.0 + STEP_UP * too_low
    assert preemptions < 60
    assert last < 600.0
