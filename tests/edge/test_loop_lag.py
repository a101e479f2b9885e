"""The loop's lag is seen, counted and named. No test here depends on how fast the machine is."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvgate.edge.observing import loop_lag
from kvgate.edge.observing.collector import Collector
from kvgate.edge.observing.loop_lag import LoopLag


class Loop:
    """Runs what is due when told to."""

    def __init__(self) -> None:
        self.callback: Callable[[], None] = lambda: None
        self.timers = 0

    def call_later(self, delay: float, callback: Callable[[], None]) -> Loop:
        self.callback = callback
        self.timers += 1
        return self

    def cancel(self) -> None:
        self.timers -= 1


class Times:
    """Wall clock and processor time of the thread, moved by hand."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def now(self) -> float:
        return self.wall

    def used(self) -> float:
        return self.cpu


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    made = Times()
    monkeypatch.setattr(loop_lag.clock, "now", made.now)
    monkeypatch.setattr(loop_lag, "thread_time", made.used)
    return made


@pytest.fixture
def lag(times: Times) -> Iterator[tuple[LoopLag, Callable[..., None]]]:
    """A meter, and `late(seconds, cpu=seconds)`: the next sample comes so much too late."""
    loop, made = Loop(), LoopLag()
    made.start(loop)  # type: ignore[arg-type]

    def late(seconds: float, cpu: float | None = None) -> None:
        times.wall += loop_lag.PERIOD + seconds
        times.cpu += seconds if cpu is None else cpu
        loop.callback()

    yield made, late
    made.stop()


Meter = tuple[LoopLag, Callable[..., None]]


def test_every_sample_lands_in_its_bucket_and_buckets_are_cumulative(lag: Meter) -> None:
    meter, late = lag
    for seconds in (0.0, 0.0005, 0.004, 0.019, 0.3, 2.0):
        late(seconds)
    shown = meter.snapshot()
    assert shown["samples"] == 6
    assert shown["over_20ms"] == 2
    assert shown["longest_seconds"] == pytest.approx(2.0)
    assert shown["sum_seconds"] == pytest.approx(2.3235)
    assert shown["buckets"]["0.001"] == 2
    assert shown["buckets"]["0.005"] == 3
    assert shown["buckets"]["0.02"] == 4
    assert shown["buckets"]["1.0"] == 5
    assert shown["buckets"]["+Inf"] == 6


def test_the_recent_longest_is_forgotten_after_a_minute_and_the_longest_is_not(lag: Meter) -> None:
    meter, late = lag
    late(0.5)
    for _ in range(59):
        late(0.99)  # a second each
    assert meter.recent_longest == pytest.approx(0.99)
    for _ in range(80 * 100):
        late(0.0)
    assert meter.recent_longest == 0.0
    assert meter.longest == pytest.approx(0.99)


def test_a_stop_of_an_hour_costs_no_more_than_any_other(lag: Meter, times: Times) -> None:
    meter, late = lag
    late(3600.0, cpu=0.0)
    late(0.0)
    assert meter.recent_longest == pytest.approx(3600.0)
    assert meter.stalls[-1].cause == "no processor"


def test_a_stall_of_work_carries_the_step_that_was_noted(lag: Meter) -> None:
    meter, late = lag
    meter.note("reload")
    late(0.03)
    late(0.03)
    assert [(s.cause, s.step) for s in meter.stalls] == [("work", "reload"), ("work", "")]


def test_a_thread_that_did_not_get_the_processor_is_not_taken_for_work(lag: Meter) -> None:
    meter, late = lag
    late(0.1, cpu=0.001)
    assert meter.stalls[-1].cause == "no processor"
    shown = meter.snapshot()
    assert shown["causes"] == {"no processor": 1}
    assert shown["longest_own_seconds"] == pytest.approx(0.001)


def test_a_collection_of_garbage_is_named_with_its_generation(lag: Meter, times: Times) -> None:
    meter, late = lag
    meter._on_gc("start", {"generation": 2})
    times.wall += 0.05
    times.cpu += 0.05
    meter._on_gc("stop", {"generation": 2})
    late(0.0)
    (stall,) = meter.stalls
    assert (stall.cause, stall.gc_generation) == ("gc", 2)
    assert meter.gc_longest == pytest.approx(0.05)


def test_the_kept_stalls_are_bounded_and_all_are_counted(lag: Meter) -> None:
    meter, late = lag
    for _ in range(loop_lag.STALLS_KEPT + 50):
        late(0.03)
    assert len(meter.stalls) == loop_lag.STALLS_KEPT
    assert meter.over_stall == loop_lag.STALLS_KEPT + 50


def test_stopping_leaves_neither_a_timer_nor_a_hook() -> None:
    before = list(gc.callbacks)
    loop, meter = Loop(), LoopLag()
    meter.start(loop)  # type: ignore[arg-type]
    assert len(gc.callbacks) == len(before) + 1
    meter.stop()
    meter.stop()
    assert gc.callbacks == before
    assert loop.timers == 0


async def test_a_loop_that_is_blocked_is_seen_to_lag() -> None:
    meter = LoopLag()
    meter.start(asyncio.get_running_loop())
    try:
        time.sleep(0.1)  # noqa: ASYNC251 - the stall that is to be seen
        while not meter.stalls:  # noqa: ASYNC110 - nothing tells of a stall
            await asyncio.sleep(0)
    finally:
        meter.stop()
    # A stall is shown at most one period too short.
    assert meter.longest >= 0.1 - loop_lag.PERIOD


def test_the_collector_waits_for_an_idle_moment_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    collected: list[Any] = []
    before = gc.get_threshold()
    collector = Collector(steps.append)
    collector.start()
    try:
        monkeypatch.setattr(gc, "collect", lambda: collected.append(1))
        for pending, is_idle, wanted in ((1, True, 0), (9, False, 0), (9, True, 1), (1000, False, 2)):
            monkeypatch.setattr(gc, "get_count", lambda pending=pending: (0, 0, pending))
            collector.sweep(is_idle=is_idle)
            assert len(collected) == wanted
        assert steps == ["full collection"] * 2
    finally:
        collector.stop()
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
