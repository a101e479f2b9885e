"""The study of retries: what it measures is true, and the gate's rule is no worse than any other."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from random import Random

import pytest

from kvgate.lab.retry_study import RULES, forecast_errors, main, ours, study
from kvgate.lab.retry_traffic import BLOCK, BURSTS, STEADY, Row, Scene, Wish, made_up, read, wishes
from kvgate.lab.retry_world import Figures, Rule, World, quantile

POOL = 7500
ROWS = made_up(Random(1), 500)
NO_RETRY = Rule("no retry", lambda refused, tries, rng: None)


def wish(at: float, blocks: int, life: float) -> Wish:
    return Wish(at, 1, blocks * BLOCK, life)


def test_who_finds_room_is_served_and_the_others_fail_without_a_retry() -> None:
    figures = World(NO_RETRY, 10, 1).run([wish(0.0, 10, 5.0), wish(1.0, 1, 5.0), wish(6.0, 10, 5.0)])
    assert (figures.served, figures.failed, figures.attempts) == (2, 1, 3)
    assert figures.waits == [0.0, 0.0]


def test_a_refused_client_comes_back_when_its_rule_says_and_three_times_in_all() -> None:
    rule = Rule("2 s", lambda refused, tries, rng: 2.0)
    figures = World(rule, 10, 1).run([wish(0.0, 10, 3.0), wish(0.5, 1, 1.0), wish(9.0, 1, 1.0)])
    assert figures.waits == [0.0, 4.0, 0.0]
    assert (figures.attempts, sum(figures.retries.values())) == (5, 2)
    figures = World(rule, 10, 1).run([wish(0.0, 10, 30.0), wish(0.5, 1, 1.0)])
    assert (figures.failed, figures.attempts) == (1, 4)


def test_who_may_wait_is_let_in_when_room_comes() -> None:
    figures = World(ours(30.0), 10, 1).run([wish(0.0, 10, 3.0), wish(1.0, 1, 1.0)])
    assert figures.waits == [0.0, 2.0]
    assert figures.attempts == 2


def test_the_pool_is_as_full_as_what_was_held_in_it() -> None:
    figures = World(NO_RETRY, 10, 1).run([wish(0.0, 5, 4.0), wish(8.0, 1, 1.0)])
    assert figures.utilisation == pytest.approx(5 * 4 / (10 * 8))


def test_how_long_it_really_took_until_it_fitted_is_measured() -> None:
    figures = World(NO_RETRY, 10, 1).run([wish(0.0, 10, 4.0), wish(1.0, 3, 1.0), wish(2.0, 10, 1.0)])
    assert [actual for _, _, actual in figures.errors] == [3.0, 2.0]


@pytest.mark.parametrize("scene", [STEADY, BURSTS, Scene("half", 0.5)])
def test_as_much_arrives_as_the_scene_says(scene: Scene) -> None:
    made = list(wishes(ROWS, scene, POOL, 3600.0, 1024, Random(3)))
    load = sum(w.blocks * w.life for w in made) / (POOL * 3600.0)
    assert load == pytest.approx(scene.load, rel=0.05)
    if scene.burst:
        inside = sum(w.at % scene.period < scene.burst for w in made)
        rates = inside / scene.burst, (len(made) - inside) / (scene.period - scene.burst)
        assert rates[0] / rates[1] == pytest.approx(scene.times, rel=0.15)


def test_the_same_seed_gives_the_same_requests_and_the_same_figures() -> None:
    once = study(ROWS, STEADY, RULES[1], seconds=60.0, cap=1024, seed=5, pool_blocks=1000)
    again = study(ROWS, STEADY, RULES[1], seconds=60.0, cap=1024, seed=5, pool_blocks=1000)
    assert once == again


def test_a_fitted_cap_covers_the_answer() -> None:
    for made in wishes([Row(10, 300)], STEADY, POOL, 20.0, None, Random(1)):
        assert made.cap == 1024


def test_ours_fails_fewer_and_makes_no_larger_a_herd_than_any_other_rule() -> None:
    for scene in (STEADY, BURSTS):
        by_rule: dict[str, Figures] = {
            rule.name: study(ROWS, scene, rule, seconds=600.0, cap=1024, seed=1, pool_blocks=POOL)
            for rule in RULES
        }
        ours_names = [rule.name for rule in RULES if rule.knows]
        others = {name: f for name, f in by_rule.items() if name not in ours_names}
        for name in ours_names:
            assert by_rule[name].failed_share <= min(f.failed_share for f in others.values()), name
            retrying = [f.peak for f in others.values() if f.peak]
            assert by_rule[name].peak <= min(retrying) + 2, name
            assert by_rule[name].utilisation >= 0.95 * max(f.utilisation for f in others.values()), name


def test_the_forecast_is_nearer_to_what_happens_than_any_constant() -> None:
    figures = study(ROWS, STEADY, RULES[4], seconds=600.0, cap=1024, seed=1, pool_blocks=POOL)
    errors = forecast_errors(figures)
    for constant in ("constant 1 s", "constant 20 s", "constant 60 s"):
        assert errors["forecast behind it"][0] < errors[constant][0]
        assert errors["forecast behind it"][1] < errors[constant][1]


def test_the_quantile_of_nothing_is_nothing() -> None:
    assert quantile([], 0.9) == 0.0
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0


def test_the_command_reads_traces_and_writes_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["arrival_s,prompt_tokens,output_tokens", "0,100,20", "1,0,5", "2,50,200"]
    with gzip.open(tmp_path / "small.csv.gz", "wt") as file:
        file.write("\n".join(lines))
    assert read(tmp_path / "small.csv.gz") == [Row(100, 20), Row(50, 200)]
    out = tmp_path / "out.json"
    args = ["--traces", str(tmp_path), "--seconds", "20", "--pool", "8000", "--json", str(out)]
    assert main(args) == 0
    shown = capsys.readouterr().out
    assert "small, steady 1.15x" in shown
    assert "seed 1" in shown
    figures = json.loads(out.read_text())["small"]["bursts, mean 0.9x"]
    assert set(figures) == {rule.name for rule in RULES}
