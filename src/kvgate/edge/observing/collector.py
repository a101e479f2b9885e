"""When garbage is collected: never in the middle of ten thousand streams if it can be helped.

A full collection walks every object that may be part of a cycle, with the loop standing still: 30 ms
for a process that has just started, 0.7 s measured with ten thousand streams. Counting references
frees nearly all; what is left are cycles. So: what start-up has made is set aside for good
(`gc.freeze`), young objects are looked at less often, and the full collection waits for a moment
without a request, or until so much has piled up that waiting longer would only make it worse. Then it
is named in the loop's lag.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

# Young objects before they are looked at; Python's own figure, 700, is for scripts.
YOUNG = 5_000
MIDDLE = 5  # with YOUNG: some 30,000 objects at a time, a few milliseconds
# Collections of the middle generation after which a full one is due, and after which it is overdue.
DUE, OVERDUE = 2, 100
NEVER = 1_000_000  # collections that no process sees: Python starts no full one by itself


class Collector:
    """Owns the process's garbage collector from `start` to `stop`."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._before = gc.get_threshold()
        self._is_started = False

    def start(self) -> None:
        """Call it when everything that stays has been made."""
        self._is_started = True
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG, MIDDLE, NEVER)

    def stop(self) -> None:
        """Give the collector back as it was. Harmless when not started."""
        if self._is_started:
            self._is_started = False
            gc.set_threshold(*self._before)
            gc.unfreeze()

    def sweep(self, *, is_idle: bool) -> None:
        """Called every second or so: the full collection, if it is due and nobody minds, or overdue."""
        pending = gc.get_count()[2]
        if pending >= (DUE if is_idle else OVERDUE):
            self._note("full collection")
            gc.collect()
