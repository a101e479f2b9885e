"""One `Gate` shared by threads and event loops: reads the clock, locks, wakes those who wait.

Promises: every answer reaches the one who asked, or is undone here; what was granted to somebody who
has left is given back at once; no call waits for anything but the lock, which nobody holds for
longer than one decision. There is no timer and no thread: whoever waits looks again when its own
deadline, or the next delayed release, has come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Generic, TypeVar

from kvgate.core.gate import Gate
from kvgate.core.records import Ask, Ending, Granted, Key, PoolFacts, Queued, Reason, Refused, Seconds
from kvgate.edge import clock
from kvgate.edge.library.bells import Bell

B = TypeVar("B", bound=Bell)


class Seat(Generic[B]):
    """A place in the line. `answer` is set once, before its bell rings."""

    __slots__ = ("answer", "bell", "deadline", "has_left", "key")

    def __init__(self, key: Key, deadline: Seconds, bell: B) -> None:
        self.key = key
        self.deadline = deadline
        self.bell = bell
        self.answer: Granted | Refused | None = None
        self.has_left = False


class Turnstile:
    """The one owner of a `Gate` in a process."""

    def __init__(self, gate: Gate, now: Callable[[], Seconds] = clock.now) -> None:
        self.gate = gate
        self._now = now
        self._lock = threading.Lock()
        self._seats: dict[Key, Seat[Bell]] = {}
        # Ended for the caller, not yet let go by the engine: (due, key, ending), the next one first.
        self._lingering: list[tuple[Seconds, Key, Ending, int | None]] = []

    def ask(self, ask: Ask, make_bell: Callable[[], B]) -> Granted | Refused | Seat[B]:
        """The answer, or a seat to wait in. Granted: the caller owns it and must `end` it.

        A seat must be left with `leave`, unless its answer was taken.
        """
        with self._lock:
            now = self._catch_up()
            given = self.gate.ask(ask, now)
            if not isinstance(given, Queued):
                return given
            try:
                seat = Seat(given.key, given.deadline, make_bell())
            except BaseException:
                self._deliver(self.gate.ended(given.key, Ending.CANCELLED, now), now)
                raise
            self._seats[seat.key] = seat  # type: ignore[assignment]
            return seat

    def look(self, seat: Seat[B]) -> Granted | Refused | float:
        """The answer, or the seconds after which to look again if the bell has not rung."""
        with self._lock:
            now = self._catch_up()
            if seat.answer is None and seat.deadline <= now:
                self._deliver(self.gate.tick(now), now)
            if seat.answer is not None:
                return seat.answer
            due = self._lingering[0][0] if self._lingering else seat.deadline
            return max(0.0, min(due, seat.deadline) - now)

    def leave(self, seat: Seat[B]) -> None:
        """The one in the seat has gone: its place is given up, or what it was granted given back."""
        with self._lock:
            now = self._catch_up()
            if not seat.has_left and not isinstance(seat.answer, Refused):
                seat.has_left = True
                self._seats.pop(seat.key, None)
                self._deliver(self.gate.ended(seat.key, Ending.CANCELLED, now), now)
            self._wake_timekeeper()

    def end(self, key: Key, ending: Ending, *, tokens: int | None = None, after: Seconds = 0.0) -> None:
        """End a reservation, `after` seconds from now (until the engine has surely let go)."""
        with self._lock:
            now = self._catch_up()
            if after > 0:
                heappush(self._lingering, (now + after, key, ending, tokens))
                self._wake_timekeeper()
            else:
                self._deliver(self.gate.ended(key, ending, now, tokens=tokens), now)

    def settle(self, key: Key, blocks: int) -> None:
        """Correct a reservation downwards. Raises `Misuse` for more than it holds."""
        with self._lock:
            now = self._catch_up()
            self._deliver(self.gate.settle(key, blocks, now), now)

    def resize(self, facts: PoolFacts) -> None:
        """The engine has other sizes now."""
        with self._lock:
            now = self._catch_up()
            self._deliver(self.gate.resize(facts, now), now)

    def explain(self, ask: Ask) -> Granted | Refused:
        """What `ask` would be answered now without waiting. Changes nothing."""
        with self._lock:
            return self.gate.explain(ask, self._catch_up())

    def refused(self, reason: Reason) -> None:
        """Count a refusal that was decided outside."""
        with self._lock:
            self.gate.refused(reason)

    def figures(self) -> dict[str, int]:
        """The books at this moment."""
        with self._lock:
            self._catch_up()
            ledger = self.gate.ledger
            ledger.recount()
            return {
                "usable_blocks": ledger.facts.usable_blocks,
                "reserved_blocks": ledger.reserved_blocks,
                "free_blocks": ledger.free_blocks,
                "block_size": ledger.facts.block_size,
                "live": len(ledger),
                "lingering": len(self._lingering),
                "waiting": len(self.gate.line),
                "admissions": self.gate.admissions,
                "refusals": sum(self.gate.refusals.values()),
                "double_releases": ledger.double_releases,
            }

    # --- under the lock

    def _catch_up(self) -> Seconds:
        """End what is due. Returns the time."""
        now = self._now()
        while self._lingering and self._lingering[0][0] <= now:
            _, key, ending, tokens = heappop(self._lingering)
            self._deliver(self.gate.ended(key, ending, now, tokens=tokens), now)
        return now

    def _deliver(self, answers: list[Granted | Refused], now: Seconds) -> None:
        pending = list(answers)
        while pending:
            given = pending.pop(0)
            seat = self._seats.pop(given.key, None) if given.key is not None else None
            if seat is not None:
                seat.answer = given
                if seat.bell.ring():
                    continue
                seat.has_left = True
            if isinstance(given, Granted):
                # Nobody is there: its loop is gone.
                pending += self.gate.ended(given.key, Ending.CANCELLED, now)
        if answers:
            # The one who was watching the time may have been among them.
            self._wake_timekeeper()

    def _wake_timekeeper(self) -> None:
        """One of those who wait shall reckon with the releases that are due, whoever has left."""
        if self._lingering:
            for seat in self._seats.values():
                if seat.bell.ring():
                    return
