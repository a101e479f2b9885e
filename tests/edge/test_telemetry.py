"""What requests used, beside what was reserved for them: counted, shown, and said aloud where wrong."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from kvgate.edge.observing import telemetry
from kvgate.edge.observing.telemetry import Telemetry
from kvgate.edge.relay.finished import Finished
from kvgate.edge.tenants import LABELS_MAX

USED = Finished("completed", 1.0, 0.0, 60, 120, 112, 40, 40)


def figures(of: Telemetry) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in of.render().decode().splitlines() if line[:1] != "#")
    return {name: float(value) for name, _, value in lines}


@pytest.fixture
def shown() -> Telemetry:
    empty = {"version": "1", "ready": True, "uptime_seconds": 0.0, "pools": []}
    counters = {"admissions": 0, "double_releases": 0, "moves": 0, "refusals": {}, "releases": {}}
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


def series(of: Telemetry, name: str) -> dict[str, float]:
    return {key: value for key, value in figures(of).items() if key.startswith(name + "{")}


def tenant_telemetry(snapshot: dict[str, Any], *tenants: str) -> Telemetry:
    counters = {"admissions": 0, "double_releases": 0, "moves": 0, "refusals": {}, "releases": {}}
    empty = {"version": "1", "ready": True, "uptime_seconds": 0.0, "pools": [], "counters": counters}
    return Telemetry(lambda: empty | snapshot, tenants)


def test_configured_tenants_are_there_at_0_and_those_of_a_reload_join_them() -> None:
    snapshot: dict[str, Any] = {"tenants": ["acme"]}
    of = tenant_telemetry(snapshot, "acme")
    name = "kvgate_tenant_requests_total"
    assert series(of, name) == {f'{name}{{outcome="completed",tenant="acme"}}': 0}
    of.observe(replace(USED, tenant="acme"))
    snapshot["tenants"] = ["late"]
    assert series(of, name) == {
        f'{name}{{outcome="completed",tenant="acme"}}': 1,
        f'{name}{{outcome="completed",tenant="late"}}': 0,
    }


def test_what_nobody_is_told_apart_for_counts_for_the_default_tenant(shown: Telemetry) -> None:
    shown.observe(USED)
    shown.observe(replace(USED, outcome="kv_capacity"))
    name = "kvgate_tenant_requests_total"
    assert series(shown, name) == {
        f'{name}{{outcome="completed",tenant="default"}}': 1,
        f'{name}{{outcome="kv_capacity",tenant="default"}}': 1,
    }


def test_clients_cannot_grow_the_number_of_series_without_end() -> None:
    strangers = [f"key-{n}" for n in range(20 * LABELS_MAX)]
    of = tenant_telemetry({"tenants": ["acme"]}, "acme")
    for stranger in strangers:
        of.observe(replace(USED, tenant=stranger))
    of.tenants.know(["acme", "late"])
    for name in ("late", "acme", "another"):
        of.observe(replace(USED, tenant=name))
    seen = series(of, "kvgate_tenant_requests_total")
    assert len(seen) == LABELS_MAX + 3
    by_tenant = {key.partition('tenant="')[2].rstrip('"}'): number for key, number in seen.items()}
    assert by_tenant["other"] == len(strangers) - LABELS_MAX + 1
    assert by_tenant["acme"] == by_tenant["late"] == by_tenant["key-0"] == 1
    assert sum(seen.values()) == len(strangers) + 3


def test_what_a_tenant_holds_is_summed_over_the_pools_and_under_its_label() -> None:
    strangers = {f"key-{n}": 1 for n in range(LABELS_MAX + 7)}
    pools = [pool_of({"acme": 5}), pool_of({"acme": 2} | strangers)]
    of = tenant_telemetry({"tenants": ["acme", "idle"], "pools": pools}, "acme")
    seen = series(of, "kvgate_tenant_reserved_blocks")
    name = "kvgate_tenant_reserved_blocks"
    assert seen[f'{name}{{tenant="acme"}}'] == 7
    assert seen[f'{name}{{tenant="idle"}}'] == 0
    assert seen[f'{name}{{tenant="other"}}'] == 7
    assert len(seen) == LABELS_MAX + 3


def pool_of(held_by: dict[str, int]) -> dict[str, Any]:
    gauges = {key: 0 for _, key, _ in telemetry.POOL_GAUGES}
    return {"engine": "vllm", "upstream": "a", "up": True, "held_by": held_by} | gauges
