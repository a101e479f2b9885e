"""The figures of a storm. Every one is of what clients saw; `None` where there was nothing to measure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvgate.lab.storm import Outcome
from kvgate.lab.storm_load import Follow, Load

HERD_SECONDS = 0.1
STALL_SECONDS = 1.0
_SHARES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Median, 95th, 99th percentile and maximum, in seconds."""

    p50: float
    p95: float
    p99: float
    longest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Quantiles | None:
        ordered = sorted(values)
        if not ordered:
            return None
        p50, p95, p99 = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in _SHARES)
        return cls(p50, p95, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class Report:
    """`goodput`: tokens of whole answers a second; `offered`: the output caps of all that were asked.

    `fairness`: Jain's index over the keys' shares of served to asked requests (1: all alike, 1/n: one
    key has everything). `herd`: the largest share of all retries that came in one 100 ms.
    """

    seconds: float
    was_stopped: bool
    asked: int
    finished: int
    died: int
    refused: int
    left: int
    refusals: dict[str, int]
    retries: int
    attempts_per_success: float | None
    tokens_whole: int
    tokens_thrown_away: int
    goodput: float
    goodput_over_offered: float | None
    wait: Quantiles | None
    first_token: Quantiles | None
    between_tokens: Quantiles | None
    stalls: int
    fairness: float | None
    served_by_key: dict[int, tuple[int, int]]
    herd: float | None
    herd_retries: int
    deaths: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        def plain(value: Any) -> Any:
            if isinstance(value, Quantiles):
                return {name: round(getattr(value, name), 4) for name in value.__slots__}
            return round(value, 4) if isinstance(value, float) else value

        return {name: plain(getattr(self, name)) for name in self.__slots__}


def report(load: Load) -> Report:
    """The figures so far, or at the end."""
    asked = [follow for follow in load.follows if follow.asked is not None]
    by_outcome = load.outcomes()
    whole = sum(f.stream.tokens for f in asked if f.stream.outcome is Outcome.FINISHED)
    offered = sum(f.planned.cap for f in asked if f.planned.cap is not None)
    capped = sum(
        f.stream.tokens for f in asked if f.stream.outcome is Outcome.FINISHED and f.planned.cap is not None
    )
    finished = by_outcome[Outcome.FINISHED]
    attempts = sum(1 + f.stream.retries for f in asked)
    served = _served_by_key(asked)
    herd, largest = herd_of([at for f in asked for at in f.retries])
    gaps = [gap for f in asked for gap in f.stream.gaps]
    return Report(
        seconds=load.elapsed,
        was_stopped=load.was_stopped,
        asked=len(asked),
        finished=finished,
        died=by_outcome[Outcome.DIED],
        refused=by_outcome[Outcome.REFUSED],
        left=by_outcome[Outcome.LEFT],
        refusals=dict(Counter(reason for f in asked for reason in f.reasons)),
        retries=sum(f.stream.retries for f in asked),
        attempts_per_success=attempts / finished if finished else None,
        tokens_whole=whole,
        tokens_thrown_away=sum(f.stream.tokens for f in asked if f.stream.outcome is Outcome.DIED),
        goodput=whole / load.elapsed if load.elapsed else 0.0,
        goodput_over_offered=capped / offered if offered else None,
        wait=Quantiles.of(f.wait for f in asked if f.wait is not None),
        first_token=Quantiles.of(
            f.stream.seconds_to_first_token for f in asked if f.stream.seconds_to_first_token is not None
        ),
        between_tokens=Quantiles.of(gaps),
        stalls=sum(gap > STALL_SECONDS for gap in gaps),
        fairness=jain([done / all_ for done, all_ in served.values()]),
        served_by_key=served,
        herd=herd,
        herd_retries=largest,
        deaths=tuple(sorted({f.stream.detail for f in asked if f.stream.outcome is Outcome.DIED})),
    )


def jain(shares: Sequence[float]) -> float | None:
    """Jain's fairness index (1984): (sum of x)^2 / (n x sum of x^2). None for fewer than two keys."""
    squares = sum(x * x for x in shares)
    if len(shares) < 2 or not squares:
        return None
    return sum(shares) ** 2 / (len(shares) * squares)


def herd_of(moments: Sequence[float]) -> tuple[float | None, int]:
    """`(largest share, how many)` of the moments that fall into any window of 100 ms."""
    ordered = sorted(moments)
    first = largest = 0
    for last, moment in enumerate(ordered):
        while moment - ordered[first] >= HERD_SECONDS:
            first += 1
        largest = max(largest, last - first + 1)
    return (largest / len(ordered) if ordered else None), largest


def _served_by_key(asked: Iterable[Follow]) -> dict[int, tuple[int, int]]:
    served: dict[int, tuple[int, int]] = {}
    for follow in asked:
        done, all_ = served.get(follow.planned.key, (0, 0))
        is_served = follow.stream.outcome is Outcome.FINISHED
        served[follow.planned.key] = done + is_served, all_ + 1
    return dict(sorted(served.items()))
