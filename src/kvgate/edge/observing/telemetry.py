"""The gateway's figures in Prometheus' words.

Promises: the hot path only counts integers; they are read when somebody scrapes. Every value that a
label can take is present from the start, at 0, so that a rate over it is right from the first event.
Each gateway has a registry of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvgate.core.records import Ending, Reason
from kvgate.edge import clock
from kvgate.edge.observing.histogram import Histogram
from kvgate.edge.observing.tenant_figures import TenantFigures

_log = logging.getLogger("kvgate.telemetry")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Snapshot = dict[str, Any]

# A short answer takes tenths of a second, a long one on a busy engine minutes.
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
# Most requests do not wait at all; those that do wait as long as the operator allows.
WAIT_BUCKETS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
# Fine where outputs end early, as most do; a bound at 1, above which nothing may ever be.
USE_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0, 1.1, 1.5, 2.0)
# A pool that is outgrown is outgrown by many requests; one line a minute says so.
WARNING_SECONDS = 60.0

POOL_GAUGES = (
    ("reserved_blocks", "reserved_blocks", "KV blocks reserved by admitted requests"),
    ("usable_blocks", "usable_blocks", "KV blocks that may be reserved: total x safety fraction"),
    ("total_blocks", "total_blocks", "KV blocks of the engine"),
    ("live_reservations", "live", "Requests that hold a reservation"),
    ("waiting_requests", "waiting", "Requests that wait for room"),
    ("reserved_sequences", "reserved_seqs", "Sequences reserved by admitted requests"),
)


class Finished(Protocol):
    """What the gateway tells of a priced request that has ended."""

    @property
    def outcome(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def wait_seconds(self) -> float: ...
    @property
    def used_tokens(self) -> int | None: ...
    @property
    def priced_tokens(self) -> int | None: ...
    @property
    def reserved_tokens(self) -> int | None: ...
    @property
    def counted_prompt(self) -> int | None: ...
    @property
    def engine_prompt(self) -> int | None: ...
    @property
    def tenant(self) -> str: ...


class Telemetry:
    """A registry over `read`, and the histograms that `observe` feeds. `tenants`: the configured names."""

    def __init__(self, read: Callable[[], Snapshot], tenants: Iterable[str] = ()) -> None:
        self.tenants = TenantFigures(tenants)
        self.registry = CollectorRegistry()
        self.registry.register(_SnapshotCollector(read, self.tenants))
        self._request_seconds = self._histogram(
            "kvgate_request_seconds",
            "From a whole priced request to the end of its answer",
            REQUEST_BUCKETS,
            label="outcome",
        )
        self._wait_seconds = self._histogram(
            "kvgate_wait_seconds", "Time that a priced request waited for room", WAIT_BUCKETS
        ).of("")
        self._used_of_reserved = self._histogram(
            "kvgate_used_of_reserved",
            "Tokens that the engine reported as used, as a share of those reserved",
            USE_BUCKETS,
        ).of("")
        self._above = Counter(
            "kvgate_use_above_reservation",
            "Requests that used more tokens than they were priced at; each is a bug or a wrong setting",
            registry=self.registry,
        )
        miscounts = Counter(
            "kvgate_prompt_miscount",
            "Prompts whose count before differs from the engine's: under, or over it",
            ["direction"],
            registry=self.registry,
        )
        self._under, self._over = miscounts.labels("under"), miscounts.labels("over")
        self._warned_at: float | None = None

    def _histogram(
        self, name: str, text: str, bounds: Sequence[float], label: str | None = None
    ) -> Histogram:
        histogram = Histogram(name, text, bounds, label)
        self.registry.register(histogram)
        return histogram

    def observe(self, finished: Finished) -> None:
        """Take one finished request. Called on the gateway's loop."""
        self._request_seconds.of(finished.outcome).observe(finished.seconds)
        self._wait_seconds.observe(finished.wait_seconds)
        self.tenants.count(finished.tenant, finished.outcome)
        used, priced, reserved = finished.used_tokens, finished.priced_tokens, finished.reserved_tokens
        if used is None or priced is None or reserved is None:
            return
        self._used_of_reserved.observe(used / reserved)
        if used > priced:
            self._above.inc()
            self._warn(used, priced)
        counted, truth = finished.counted_prompt, finished.engine_prompt
        if counted is not None and truth is not None and counted != truth:
            (self._under if counted < truth else self._over).inc()

    def _warn(self, used: int, priced: int) -> None:
        now = clock.now()
        if self._warned_at is not None and now - self._warned_at < WARNING_SECONDS:
            return
        self._warned_at = now
        _log.warning(
            "A request used %d tokens and was priced at %d. The pool can be outgrown: check that the engine "
            "is the one named by --engine. kvgate_use_above_reservation_total counts such requests.",
            used,
            priced,
        )

    def render(self) -> bytes:
        """The whole of /metrics."""
        return generate_latest(self.registry)


class _SnapshotCollector(Collector):
    def __init__(self, read: Callable[[], Snapshot], tenants: TenantFigures) -> None:
        self._read = read
        self._tenants = tenants

    def describe(self) -> list[Metric]:
        # Says "nothing to compare" when registered, so that registering does not read the gateway.
        return []

    def collect(self) -> Iterator[Metric]:
        snapshot = self._read()
        yield from _gateway(snapshot)
        yield from _pools(snapshot["pools"])
        yield from _counters(snapshot["counters"])
        self._tenants.know(snapshot.get("tenants", ()))
        yield from self._tenants.shown(snapshot["pools"])
        if "loop_lag" in snapshot:
            yield from _loop_lag(snapshot["loop_lag"])


def _gateway(snapshot: Snapshot) -> Iterator[Metric]:
    build = GaugeMetricFamily("kvgate_build_info", "Version of kvgate; always 1", labels=["version"])
    build.add_metric([snapshot["version"]], 1)
    yield build
    yield GaugeMetricFamily("kvgate_ready", "1 while requests are taken", value=int(snapshot["ready"]))
    yield GaugeMetricFamily(
        "kvgate_uptime_seconds", "Seconds since the gateway started", value=snapshot["uptime_seconds"]
    )


def _pools(pools: list[dict[str, Any]]) -> Iterator[Metric]:
    for name, key, text in POOL_GAUGES:
        gauge = GaugeMetricFamily(f"kvgate_{name}", text, labels=["engine", "upstream"])
        for pool in pools:
            gauge.add_metric([pool["engine"], pool["upstream"]], pool[key])
        yield gauge
    up = GaugeMetricFamily(
        "kvgate_upstream_up", "1 while requests can be sent to it", labels=["engine", "upstream"]
    )
    for pool in pools:
        up.add_metric([pool["engine"], pool["upstream"]], int(pool["up"]))
    yield up
    yield from _drift(pools)
    # Ranks share a counter.
    yield from _counting([pool for pool in pools if pool.get("counting") and not pool.get("rank")])


# What the engine's own figures have shown, by the key in a pool's `drift`.
DRIFT = (
    ("engine_used_blocks", "engine_used_blocks", "KV blocks that the engine says it uses"),
    ("excess_blocks", "excess_blocks", "Blocks that the engine uses beyond those reserved"),
    ("foreign_blocks", "foreign_blocks", "Blocks at the engine that are taken for somebody else's"),
    ("held_back_blocks", "held_back_blocks", "Blocks held back for somebody else, or who was there just now"),
    ("safety_fraction", "fraction", "Share of the blocks that may be reserved now"),
)


def _drift(pools: list[dict[str, Any]]) -> Iterator[Metric]:
    watched = [(pool, pool["drift"]) for pool in pools if pool.get("drift")]
    for name, key, text in DRIFT:
        gauge = GaugeMetricFamily(f"kvgate_{name}", text, labels=["engine", "upstream"])
        for pool, drift in watched:
            if drift[key] is not None:
                gauge.add_metric([pool["engine"], pool["upstream"]], drift[key])
        yield gauge
    preempted = CounterMetricFamily(
        "kvgate_engine_preemptions",
        "Requests that the engine had to preempt since it is watched; each is a wrong size or price",
        labels=["engine", "upstream"],
    )
    for pool, drift in watched:
        preempted.add_metric([pool["engine"], pool["upstream"]], drift["preemptions"] or 0)
    yield preempted


# What was decided before the prompts were counted, by the key in a pool's `counting`.
UNCOUNTED = (
    ("bound_admissions", "on_bound", "Requests let in on a bound, before their prompts were counted"),
    ("bound_settlements", "settled", "Requests let in on a bound and corrected by their count"),
    ("uncounted_refusals", "refused_uncounted", "Requests whose length alone showed that they can never fit"),
)


def _counting(pools: list[dict[str, Any]]) -> Iterator[Metric]:
    counts = CounterMetricFamily(
        "kvgate_counts",
        "Requests whose prompts were counted, by where the count came from",
        labels=["source", "upstream"],
    )
    calls = CounterMetricFamily(
        "kvgate_engine_count_calls", "Counting calls to the engine", labels=["upstream"]
    )
    trusted = GaugeMetricFamily(
        "kvgate_tokenizer_distrusted",
        "1 when the tokenizer has counted less than the engine and is not used any more",
        labels=["upstream"],
    )
    uncounted = [
        (key, CounterMetricFamily(f"kvgate_{name}", text, labels=["upstream"]))
        for name, key, text in UNCOUNTED
    ]
    for pool in pools:
        counting = pool["counting"]
        for key, family in uncounted:
            family.add_metric([pool["upstream"]], counting[key])
        for source, times in counting["sources"].items():
            counts.add_metric([source, pool["upstream"]], times)
        calls.add_metric([pool["upstream"]], counting["engine_calls"])
        trusted.add_metric([pool["upstream"]], int(bool(counting.get("distrusted"))))
    yield from (counts, calls, trusted, *(family for _, family in uncounted))


def _counters(counters: dict[str, Any]) -> Iterator[Metric]:
    yield CounterMetricFamily("kvgate_admissions", "Requests admitted", value=counters["admissions"])
    yield CounterMetricFamily(
        "kvgate_double_release",
        "Releases of what was released already; each is a bug, and changed nothing",
        value=counters["double_releases"],
    )
    yield CounterMetricFamily(
        "kvgate_line_moves",
        "Requests that waited for one pool and went to another one that had room first",
        value=counters["moves"],
    )
    refusals, releases = counters["refusals"], counters["releases"]
    refused = CounterMetricFamily("kvgate_refusals", "Requests refused, by reason", labels=["reason"])
    for reason in Reason:
        refused.add_metric([reason.value], refusals.get(reason.value, 0))
    yield refused
    released = CounterMetricFamily(
        "kvgate_releases", "Reservations given back, by how the request ended", labels=["cause"]
    )
    for ending in Ending:
        released.add_metric([ending.value], releases.get(ending.value, 0))
    yield released


def _loop_lag(lag: dict[str, Any]) -> Iterator[Metric]:
    histogram = HistogramMetricFamily(
        "kvgate_event_loop_lag_seconds",
        "How late the event loop ran what was due; every stream waits so long",
    )
    histogram.add_metric([], list(lag["buckets"].items()), lag["sum_seconds"])
    yield histogram
    yield GaugeMetricFamily(
        "kvgate_event_loop_lag_longest_seconds",
        "The longest lag of the event loop in the recent minute",
        value=lag["recent_longest_seconds"],
    )
