"""What requests used, beside what was reserved for them: counted, shown, and said aloud where wrong."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from kvgate.edge.observing import telemetry
from kvgate.edge.observing.telemetry import Telemetry
from kvgate.edge.relay.finished import Finished

USED = Finished("completed", 1.0, 0.0, 60, 120, 112, 40, 40)


def figures(of: Telemetry) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in of.render().decode().splitlines() if line[:1] != "#")
    return {name: float(value) for name, _, value in lines}


@pytest.fixture
def shown() -> Telemetry:
    empty = {"version": "1", "ready": True, "uptime_seconds": 0.0, "pools": []}
    counters = {"admissions": 0, "double_releases": 0, "refusals": {}, "releases": {}}
    return Telemetry(lambda: empty | {"counters": counters})


def test_every_figure_is_there_at_0_from_the_start(shown: Telemetry) -> None:
    seen = figures(shown)
    assert seen["kvgate_use_above_reservation_total"] == 0
    assert seen['kvgate_prompt_miscount_total{direction="under"}'] == 0
    assert seen['kvgate_prompt_miscount_total{direction="over"}'] == 0
    assert seen["kvgate_used_of_reserved_count"] == 0


def test_use_within_the_reservation_fills_the_histogram_and_nothing_else(shown: Telemetry) -> None:
    shown.observe(USED)
    shown.observe(replace(USED, used_tokens=120))  # the last token is never stored
    seen = figures(shown)
    assert seen["kvgate_used_of_reserved_count"] == 2
    assert seen["kvgate_used_of_reserved_sum"] == pytest.approx(180 / 112)
    assert seen["kvgate_use_above_reservation_total"] == 0


def test_what_the_engine_did_not_tell_is_not_counted(shown: Telemetry) -> None:
    shown.observe(Finished("cancelled", 1.0, 0.0))
    shown.observe(replace(USED, used_tokens=None, engine_prompt=None))
    assert figures(shown)["kvgate_used_of_reserved_count"] == 0


def test_a_prompt_counted_in_another_way_is_told_by_direction(shown: Telemetry) -> None:
    for engine_prompt in (41, 42, 39, None):
        shown.observe(replace(USED, engine_prompt=engine_prompt))
    shown.observe(replace(USED, counted_prompt=None))
    seen = figures(shown)
    assert seen['kvgate_prompt_miscount_total{direction="under"}'] == 2
    assert seen['kvgate_prompt_miscount_total{direction="over"}'] == 1


def test_use_above_the_reservation_is_counted_each_time_and_logged_once_a_minute(
    shown: Telemetry, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(telemetry.clock, "now", lambda: now)
    with caplog.at_level(logging.WARNING, "kvgate"):
        for step in (0.0, 1.0, 58.0, 1.0, 1.0):
            now += step
            shown.observe(replace(USED, used_tokens=121))
    assert figures(shown)["kvgate_use_above_reservation_total"] == 5
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "121 tokens and was priced at 120" in caplog.text
