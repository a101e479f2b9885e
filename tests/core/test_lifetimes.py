"""Survival curves: what they learn, what they do not learn from, and what they say of an age."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.lifetimes import EDGES, ENOUGH, Lifetimes


def taught(*ages: float, quantile: float = 0.5) -> Lifetimes:
    curve = Lifetimes(quantile)
    for age in ages:
        curve.observe(age, completed=True)
    return curve


def test_too_few_answers_say_nothing() -> None:
    assert taught(*[1.0] * (ENOUGH - 1)).end_given(0.0) is None
    assert taught(*[1.0] * ENOUGH).end_given(0.0) is not None


def test_the_quantile_is_that_of_the_answers_within_a_bin() -> None:
    rng = random.Random(4)
    ages = [rng.expovariate(0.1) for _ in range(1500)]
    for quantile in (0.3, 0.5, 0.6, 0.9):
        said = taught(*ages, quantile=quantile).end_given(0.0)
        true = sorted(ages)[int(quantile * len(ages))]
        assert said is not None
        assert true <= said <= true * 1.25 * 1.05


def test_an_answer_that_has_outlived_the_short_ones_is_expected_to_be_a_long_one() -> None:
    curve = taught(*[1.0] * 50, *[30.0] * 50)
    young, old = curve.end_given(0.0), curve.end_given(2.0)
    assert young is not None
    assert old is not None
    assert young < 2.0
    assert 30.0 <= old <= 30.0 * 1.25


def test_answers_that_were_cut_off_do_not_teach_that_answers_are_short() -> None:
    patient = taught(*[30.0] * 50)
    impatient = taught(*[30.0] * 50)
    for _ in range(500):
        impatient.observe(1.0, completed=False)
    assert impatient.end_given(0.0) == patient.end_given(0.0)


def test_an_age_that_no_answer_has_reached_is_not_spoken_of() -> None:
    assert taught(*[1.0] * 50).end_given(100.0) is None


def test_old_answers_are_forgotten() -> None:
    curve = taught(*[100.0] * 3000)
    for _ in range(9000):
        curve.observe(1.0, completed=True)
    said = curve.end_given(0.0)
    assert said is not None
    assert said < 2.0


@given(st.lists(st.tuples(st.floats(0, 20_000), st.booleans()), max_size=120), st.floats(0, 20_000))
def test_what_is_said_is_a_later_age_or_nothing(observed: list[tuple[float, bool]], age: float) -> None:
    curve = Lifetimes(0.6)
    for seconds, completed in observed:
        curve.observe(seconds, completed=completed)
    said = curve.end_given(age)
    assert said is None or (said in EDGES and said > age / 1.25)
