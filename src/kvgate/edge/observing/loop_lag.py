"""How late the event loop runs what is due, and why: the longest delay that the gate adds by itself.

Promises: a timer every `PERIOD` seconds compares when it ran with when it was due; that is the whole
cost, about 2 us of processor time each. A stall is shown at most one period too short, never too long. Lag
of `STALL` seconds or more is kept with a cause: a collection of garbage, work on the loop (named by
`note`, where the step said so), or a thread that did not get the processor (or waited in a call).
It knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import gc
from bisect import bisect_left
from collections import Counter, deque
from dataclasses import asdict, dataclass
from time import thread_time
from typing import Any

from kvgate.edge import clock

PERIOD = 0.010
STALL = 0.020
STALLS_KEPT = 100
SLOT_SECONDS = 10.0
SLOTS = 7  # the newest is still filling: together they cover the recent minute
BOUNDS = (0.001, 0.002, 0.005, 0.010, 0.020, 0.050, 0.100, 0.200, 0.500, 1.0)


@dataclass(frozen=True, slots=True)
class Stall:
    """One lag of `STALL` seconds or more. Times in seconds; `at` counts from the start."""

    at: float
    seconds: float
    cause: str  # "gc", "work" or "no processor"
    step: str  # what `note` said last in that time, or ""
    cpu_seconds: float  # processor time of the loop's thread since the sample before
    gc_seconds: float  # of which, or beside which, collecting garbage
    gc_generation: int  # oldest generation that was collected; -1: none


class LoopLag:
    """Measures one event loop, from `start` to `stop`."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.longest_own = 0.0  # seconds of a lag that this thread itself was computing
        self.samples = 0
        self.over_stall = 0
        self.causes: Counter[str] = Counter()  # of every stall, those that are not kept too
        self.stalls: deque[Stall] = deque(maxlen=STALLS_KEPT)
        self.gc_longest = 0.0
        self._sum = 0.0
        self._counts = [0] * (len(BOUNDS) + 1)
        self._slots: deque[float] = deque([0.0], maxlen=SLOTS)
        self._slot_ends = 0.0
        self._step = ""
        self._gc_began = self._gc_seconds = 0.0
        self._gc_generation = -1
        self.began = self._due = self._cpu = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to measure `loop`; call it in the loop's own thread."""
        self._loop = loop
        self.began = clock.now()
        self._slot_ends = self.began + SLOT_SECONDS
        self._cpu = thread_time()
        gc.callbacks.append(self._on_gc)
        self._again()

    def stop(self) -> None:
        """Measure no more. What was measured stays. Harmless when not started."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            gc.callbacks.remove(self._on_gc)

    def note(self, step: str) -> None:
        """Name the big step that begins now, for the stall that it may cause."""
        self._step = step

    @property
    def recent_longest(self) -> float:
        """Seconds: the longest lag of the last minute, and of up to ten seconds before it."""
        return max(self._slots)

    def snapshot(self) -> dict[str, Any]:
        """Plain values for `/status` and `/metrics`. Buckets are cumulative, as Prometheus has them."""
        buckets, below = {}, 0
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self._counts, strict=True):
            below += count
            buckets[bound] = below
        return {
            "longest_seconds": self.longest,
            "recent_longest_seconds": self.recent_longest,
            "samples": self.samples,
            "over_20ms": self.over_stall,
            "buckets": buckets,
            "sum_seconds": self._sum,
            "longest_own_seconds": self.longest_own,
            "causes": dict(self.causes),
            "gc_longest_seconds": self.gc_longest,
            "stalls": [asdict(stall) for stall in self.stalls],
        }

    def _again(self) -> None:
        assert self._loop is not None
        self._timer = self._loop.call_later(PERIOD, self._sample)
        self._due = clock.now() + PERIOD

    def _sample(self) -> None:
        now = clock.now()
        lag = max(0.0, now - self._due)
        cpu = thread_time()
        used, self._cpu = cpu - self._cpu, cpu
        self.longest_own = max(self.longest_own, min(lag, used))
        self.samples += 1
        self._sum += lag
        self._counts[bisect_left(BOUNDS, lag)] += 1
        if now >= self._slot_ends:
            self._next_slot(now)
        if lag > self._slots[-1]:
            self._slots[-1] = lag
            self.longest = max(self.longest, lag)
        if lag >= STALL:
            self._stalled(now, lag, used)
        self._step = ""
        self._gc_seconds, self._gc_generation = 0.0, -1
        self._again()

    def _next_slot(self, now: float) -> None:
        while now >= self._slot_ends:
            self._slots.append(0.0)
            # After a very long stop (a suspended machine) only the newest slots matter.
            self._slot_ends = max(self._slot_ends + SLOT_SECONDS, now - SLOTS * SLOT_SECONDS)

    def _stalled(self, now: float, lag: float, cpu: float) -> None:
        # A thread that waits, in a call that blocks or for its turn, uses no processor time.
        own = "gc" if self._gc_seconds >= lag / 2 else "work"
        cause = own if cpu >= lag / 2 else "no processor"
        self.over_stall += 1
        self.causes[cause] += 1
        self.stalls.append(
            Stall(now - self.began, lag, cause, self._step, cpu, self._gc_seconds, self._gc_generation)
        )

    def _on_gc(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_began = clock.now()
            return
        took = clock.now() - self._gc_began
        self._gc_seconds += took
        self._gc_generation = max(self._gc_generation, info["generation"])
        self.gc_longest = max(self.gc_longest, took)
