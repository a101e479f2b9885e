"""How long answers live, learned from those that have ended.

A survival curve (Kaplan-Meier) over log-spaced ages: what was cancelled or failed counts as having
lived *at least* so long, so that impatient clients do not teach that answers are short. Old
observations are forgotten by halving. Ages and results are in seconds.
"""

from __future__ import annotations

from bisect import bisect_right
from math import inf, log

from kvgate.core.records import Seconds

# Upper edges of the bins: 50 ms to about 3 hours, each a quarter longer than the one before.
EDGES: tuple[Seconds, ...] = tuple(0.05 * 1.25**n for n in range(55))
# Below this many completions the parent (fewer distinctions) knows better.
ENOUGH = 20
# Halve the counts here: the last one to two thousand answers make up the memory.
REMEMBERED = 2000
# Quantiles are worked out anew after so many observations, and later, when one more changes little,
# after this share of all.
REFRESH, REFRESH_SHARE = 32, 0.1


class Lifetimes:
    """One survival curve."""

    __slots__ = ("_ended", "_left", "_news", "_quantile", "_residual", "completions")

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self._ended = [0.0] * (len(EDGES) + 1)
        self._left = [0.0] * (len(EDGES) + 1)
        self._residual: list[Seconds | None] = []
        self._news = 0
        self.completions = 0.0

    def observe(self, age: Seconds, *, completed: bool) -> None:
        """An answer ended at `age`; `completed` is False where it was cut off (censored)."""
        at = bisect_right(EDGES, age)
        if completed:
            self._ended[at] += 1
            self.completions += 1
        else:
            self._left[at] += 1
        self._news = news = self._news + 1
        completions = self.completions
        if news >= REFRESH and news >= REFRESH_SHARE * completions:
            self._residual = []
        if completions > REMEMBERED:
            self._ended = [n / 2 for n in self._ended]
            self._left = [n / 2 for n in self._left]
            self.completions /= 2

    def end_given(self, age: Seconds) -> Seconds | None:
        """The age by which an answer of this age has ended with the asked probability.

        None where too little is known: fewer than `ENOUGH` answers, or none that grew so old.
        """
        if self.completions < ENOUGH:
            return None
        if not self._residual:
            self._residual = self._table()
            self._news = 0
        return self._residual[bisect_right(EDGES, age)]

    def _table(self) -> list[Seconds | None]:
        """For each bin of the present age, the upper edge of the bin in which the quantile falls."""
        # Above the oldest that was seen, nothing is known.
        bins = len(self._ended)
        while bins > 1 and not (self._ended[bins - 1] or self._left[bins - 1]):
            bins -= 1
        at_risk = 0.0
        hazard = [0.0] * bins
        for b in range(bins - 1, -1, -1):
            at_risk += self._ended[b] + self._left[b]
            share = self._ended[b] / at_risk if at_risk else 0.0
            hazard[b] = -log(1.0 - share) if share < 1.0 else inf
        wanted = -log(1.0 - self._quantile)
        table: list[Seconds | None] = []
        last, total = 0, 0.0  # of hazard[first:last]
        for first in range(bins):
            if last <= first:
                last, total = first, 0.0
            while total < wanted and last < min(bins, len(EDGES)):
                total += hazard[last]
                last += 1
            table.append(EDGES[last - 1] if total >= wanted and last > first else None)
            # Subtracting infinity would leave no number; then the sum starts again behind it.
            if hazard[first] == inf:
                last = first
            else:
                total -= hazard[first]
        return table + [None] * (len(self._ended) - bins)
