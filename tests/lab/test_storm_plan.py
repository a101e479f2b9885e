"""A storm is drawn before it is sent: bounded, the same for the same seed, and as it was asked for."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from kvgate.lab.storm_plan import Arrivals, Client, Planned, Recipe, Shape, parse_clients, plan, read_trace


def test_no_plan_is_longer_than_it_was_told_to_be() -> None:
    for arrivals in (Arrivals.CLOSED, Arrivals.POISSON, Arrivals.BURST):
        made = plan(Recipe(50, 5.0, arrivals, rate=1000.0))
        assert len(made) == 50
    made = plan(Recipe(10_000, 5.0, Arrivals.POISSON, rate=10.0))
    assert 25 < len(made) < 85
    assert all(0 < each.at <= 5.0 for each in made)


def test_the_same_seed_makes_the_same_plan() -> None:
    recipe = Recipe(100, 60.0, Arrivals.BURST, keys=5, clients=parse_clients("obeying=1,sdk=1"))
    assert plan(recipe) == plan(recipe)
    assert plan(recipe) != plan(Recipe(100, 60.0, Arrivals.BURST, keys=5, seed=2))


def test_a_burst_has_three_times_the_rate_in_its_first_third() -> None:
    made = plan(Recipe(100_000, 3000.0, Arrivals.BURST, rate=5.0))
    assert len(made) == pytest.approx(15_000, rel=0.05)
    inside = sum(each.at % 30 < 10 for each in made)
    assert inside / 10 / ((len(made) - inside) / 20) == pytest.approx(3.0, rel=0.1)


def test_shapes_and_clients_come_in_their_shares() -> None:
    shapes = (Shape(10, 20, 3), Shape(99, None, 1))
    made = plan(Recipe(8000, 1.0, shapes=shapes, clients=parse_clients("obeying=3,stubborn=1"), keys=4))
    assert sum(each.cap is None for each in made) / 8000 == pytest.approx(0.25, abs=0.03)
    counts = Counter(each.client for each in made)
    assert counts[Client.STUBBORN] / 8000 == pytest.approx(0.25, abs=0.03)
    assert set(Counter(each.key for each in made)) == {0, 1, 2, 3}


def test_a_body_has_about_its_prompt_and_its_cap() -> None:
    body = json.loads(Planned(7, 0.0, 50, 20, Client.SDK, 0).body(model="m", ignore_eos=True))
    assert len(body["messages"][0]["content"].split()) == 49
    assert (body["max_tokens"], body["model"], body["ignore_eos"], body["stream"]) == (20, "m", True, True)
    unset = json.loads(Planned(7, 0.0, 50, None, Client.SDK, 0).body(model=None, ignore_eos=False))
    assert not {"max_tokens", "model", "ignore_eos"} & set(unset)


def test_a_trace_is_replayed_in_its_order_and_faster_where_asked(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens\n4,100,30\n2,50,1\n")
    assert read_trace(file, speed=2.0) == [(1.0, Shape(50, 2)), (2.0, Shape(100, 64))]
    assert read_trace(file, cap=9)[0] == (2.0, Shape(50, 9))
    made = plan(Recipe(10, 3.0, Arrivals.TRACE), read_trace(file))
    assert [(each.at, each.prompt) for each in made] == [(2.0, 50)]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "arrival_s,prompt_tokens,output_tokens\n,5,5\n"])
def test_what_is_no_trace_is_said_to_be_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(ValueError, match=r"x\.csv"):
        read_trace(tmp_path / "x.csv")


@pytest.mark.parametrize("text", ["", "5", "5:6:7:8", "0:5", "5:0", "5:6:0", "a:b", "5:6:inf"])
def test_a_shape_that_makes_no_sense_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        Shape.parse(text)


@pytest.mark.parametrize("text", ["", "polite", "sdk=x", "sdk=-1", "sdk=0", "sdk=nan"])
def test_clients_that_do_not_exist_are_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse_clients(text)


def test_shapes_and_clients_are_read() -> None:
    assert Shape.parse("10:unset:2") == Shape(10, None, 2.0)
    assert Shape.parse("10:20") == Shape(10, 20, 1.0)
    assert parse_clients("giving-up") == ((Client.GIVING_UP, 1.0),)
