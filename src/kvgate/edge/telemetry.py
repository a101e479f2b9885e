"""The gateway's figures in Prometheus' words.

Promises: the hot path only counts integers; they are read when somebody scrapes. Every value that a
label can take is present from the start, at 0, so that a rate over it is right from the first event.
Each gateway has a registry of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvgate.core.records import Ending, Reason

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Snapshot = dict[str, Any]

# A short answer takes tenths of a second, a long one on a busy engine minutes.
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
# Most requests do not wait at all; those that do wait as long as the operator allows.
WAIT_BUCKETS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

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


class Telemetry:
    """A registry over `read`, and the histograms that `observe` feeds."""

    def __init__(self, read: Callable[[], Snapshot]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_SnapshotCollector(read))
        self._request_seconds = Histogram(
            "kvgate_request_seconds",
            "From a whole priced request to the end of its answer",
            ["outcome"],
            buckets=REQUEST_BUCKETS,
            registry=self.registry,
        )
        self._wait_seconds = Histogram(
            "kvgate_wait_seconds",
            "Time that a priced request waited for room",
            buckets=WAIT_BUCKETS,
            registry=self.registry,
        )

    def observe(self, finished: Finished) -> None:
        """Take one finished request. Called on the gateway's loop."""
        self._request_seconds.labels(finished.outcome).observe(finished.seconds)
        self._wait_seconds.observe(finished.wait_seconds)

    def render(self) -> bytes:
        """The whole of /metrics."""
        return generate_latest(self.registry)


class _SnapshotCollector(Collector):
    def __init__(self, read: Callable[[], Snapshot]) -> None:
        self._read = read

    def describe(self) -> list[Metric]:
        # Says "nothing to compare" when registered, so that registering does not read the gateway.
        return []

    def collect(self) -> Iterator[Metric]:
        snapshot = self._read()
        yield from _gateway(snapshot)
        yield from _pools(snapshot["pools"])
        yield from _counters(snapshot["counters"])


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
        gauge = GaugeMetricFamily(f"kvgate_{name}", text, labels=["engine"])
        for pool in pools:
            gauge.add_metric([pool["engine"]], pool[key])
        yield gauge


def _counters(counters: dict[str, Any]) -> Iterator[Metric]:
    yield CounterMetricFamily("kvgate_admissions", "Requests admitted", value=counters["admissions"])
    yield CounterMetricFamily(
        "kvgate_double_release",
        "Releases of what was released already; each is a bug, and changed nothing",
        value=counters["double_releases"],
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
