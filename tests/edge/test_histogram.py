"""The gate's own histogram says what the client library's would."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from kvgate.edge.observing.histogram import Histogram as Own

BOUNDS = (0.05, 1, 2.5, 600)
VALUES = st.one_of(st.sampled_from([float(bound) for bound in BOUNDS]), st.floats(0, 1000))


def lines(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@given(st.lists(VALUES))
def test_without_a_label_the_figures_are_those_of_the_library(values: list[float]) -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    library, own = Histogram("h", "Text", buckets=BOUNDS, registry=theirs), Own("h", "Text", BOUNDS)
    ours.register(own)
    buckets = own.of("")
    for value in values:
        library.observe(value)
        buckets.observe(value)
    assert lines(ours) == lines(theirs)


@given(st.lists(st.tuples(st.sampled_from(["a", 'b"\\\n', "c"]), VALUES)))
def test_with_a_label_each_value_of_it_has_its_own(values: list[tuple[str, float]]) -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    library = Histogram("h", "Text", ["kind"], buckets=BOUNDS, registry=theirs)
    own = Own("h", "Text", BOUNDS, "kind")
    ours.register(own)
    for kind, value in values:
        library.labels(kind).observe(value)
        own.of(kind).observe(value)
    assert lines(ours) == lines(theirs)
