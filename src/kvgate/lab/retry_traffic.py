"""What arrives when, for the study of retries: lengths from a trace or made up, moments from a rate.

Promise: the same seed gives the same requests at the same moments, for every rule that is compared.
"""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

TOKENS_PER_SECOND = 50.0
PREFILL_PER_SECOND = 8000.0
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Row:
    """Lengths of one request, in tokens."""

    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Wish:
    """One request of one client. `life`: seconds that the engine takes for it."""

    at: float
    prompt: int
    cap: int
    life: float

    @property
    def blocks(self) -> int:
        return -(-(self.prompt + self.cap - 1) // BLOCK)


@dataclass(frozen=True, slots=True)
class Scene:
    """How many arrive: `load` as a share of what the pool can serve on average; in every `period`
    seconds the first `burst` have `times` the rate of the others."""

    name: str
    load: float
    period: float = 0.0
    burst: float = 0.0
    times: float = 1.0


STEADY = Scene("steady 1.15x", 1.15)
BURSTS = Scene("bursts, mean 0.9x", 0.9, 120.0, 40.0, 3.0)


def made_up(rng: Random, count: int = 4000) -> list[Row]:
    """Lengths like those of public chat traces: a log-normal prompt, an answer of one of two kinds."""
    rows = []
    for _ in range(count):
        prompt = min(6000, max(8, round(rng.lognormvariate(6.6, 0.9))))
        middle = 4.6 if rng.random() < 0.6 else 5.9
        rows.append(Row(prompt, min(1000, max(4, round(rng.lognormvariate(middle, 0.4))))))
    return rows


def read(path: Path) -> list[Row]:
    """The lengths of a trace (`.csv` or `.csv.gz`) with columns prompt_tokens and output_tokens."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        rows = [Row(int(r["prompt_tokens"]), int(r["output_tokens"])) for r in csv.DictReader(file)]
    return [row for row in rows if row.prompt > 0 and row.output > 0]


def wishes(
    rows: Sequence[Row], scene: Scene, pool_blocks: int, seconds: float, cap: int | None, rng: Random
) -> Iterator[Wish]:
    """Requests for `seconds`. `cap` None: the power of two above twice the answer, as careful clients
    set it; else the same cap for all, at least the answer."""

    def wish(row: Row, at: float) -> Wish:
        own = 1 << math.ceil(math.log2(2 * row.output)) if cap is None else max(cap, row.output)
        pace = TOKENS_PER_SECOND * rng.lognormvariate(0.0, 0.1)
        return Wish(at, row.prompt, own, row.prompt / PREFILL_PER_SECOND + row.output / pace)

    sample = [wish(row, 0.0) for row in rows]
    sample = [each for each in sample if each.blocks <= pool_blocks]
    each_costs = sum(each.blocks * each.life for each in sample) / len(sample)
    mean = scene.load * pool_blocks / each_costs
    calm = mean
    if scene.period:
        calm = mean / (1 + (scene.times - 1) * scene.burst / scene.period)
    now = 0.0
    top = calm * max(1.0, scene.times)
    while now < seconds:
        # Thinning: draw at the highest rate, keep the share that belongs to this moment.
        now += rng.expovariate(top)
        is_burst = scene.period and now % scene.period < scene.burst
        if rng.random() * top < (calm * scene.times if is_burst else calm):
            # Drawn, not in their order: a stretch of a trace may be heavier than the whole.
            made = wish(rng.choice(rows), now)
            if made.blocks <= pool_blocks:
                yield made
