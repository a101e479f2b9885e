"""When may a refused client come back? A first, honest estimate.

Each live reservation is expected to last `output cap x seconds per cap token`, where the factor is
learned from answers that completed (a cancelled or failed one must not teach that answers are
short). Room for s blocks is expected when enough of them have ended. Every refused client then
gets a slot of its own behind those already promised, so that they do not all come back at once
(virtual scheduling, as in GCRA): `tat = max(tat, room) + s / drain`.

Whole-second headers and their limits belong to `wire`; this file deals in seconds.
"""

from __future__ import annotations

from kvgate.core.records import Key, Seconds

# Before the first answer completes: 50 tokens/s a stream, a common speed of engines under load.
SECONDS_PER_TOKEN_COLD = 0.02
# Weight of the newest answer. About 20 answers make up the memory.
LEARNING_RATE = 0.1
# Clients must not be told to come back sooner or later than this (docs/refusals.md says why).
RETRY_MIN: Seconds = 1.0
RETRY_MAX: Seconds = 60.0


class Forecast:
    """Expected ends of the live reservations, and the slots already promised."""

    __slots__ = ("_dirty", "_ends", "_live", "_promised", "seconds_per_cap_token")

    def __init__(self) -> None:
        self.seconds_per_cap_token = SECONDS_PER_TOKEN_COLD
        self._live: dict[Key, tuple[Seconds, int, int]] = {}
        self._ends: list[tuple[Seconds, int]] = []
        self._dirty = False
        self._promised: Seconds = 0.0

    def started(self, key: Key, output_cap: int, blocks: int, now: Seconds) -> None:
        self._live[key] = (now, output_cap, blocks)
        self._dirty = True

    def settled(self, key: Key, blocks: int) -> None:
        """It holds fewer blocks now, so that fewer will come free at its end."""
        started, output_cap, _ = self._live[key]
        self._live[key] = (started, output_cap, blocks)
        self._dirty = True

    def ended(self, key: Key, now: Seconds, *, learn: bool) -> None:
        live = self._live.pop(key, None)
        if live is None:
            return
        self._dirty = True
        if learn:
            started, output_cap, _ = live
            sample = max(0.0, now - started) / max(1, output_cap)
            self.seconds_per_cap_token += LEARNING_RATE * (sample - self.seconds_per_cap_token)

    def room_in(self, blocks: int, now: Seconds) -> Seconds:
        """Seconds until `blocks` more are expected to have come free; O(live) after a change."""
        if self._dirty:
            factor = self.seconds_per_cap_token
            self._ends = sorted((started + cap * factor, held) for started, cap, held in self._live.values())
            self._dirty = False
        freed = 0
        for end, held in self._ends:
            freed += held
            if freed >= blocks:
                return max(0.0, end - now)
        return max(0.0, self._ends[-1][0] - now) if self._ends else 0.0

    def slot(self, blocks: int, short: int, now: Seconds, draw: float) -> Seconds:
        """Seconds after which a refused client that needs `blocks` should come back.

        `short`: blocks missing now. `draw` in [0, 1) adds up to half of the client's own slot, so
        the answer is never earlier than the forecast.
        """
        room = self.room_in(short, now)
        spacing = blocks * self._seconds_per_block(now)
        start = max(now + room, self._promised)
        wait = max(RETRY_MIN, start - now) + draw * max(spacing / 2, 0.25)
        if wait < RETRY_MAX:
            # One large slot must not push everybody else out for longer than anybody is told to wait.
            self._promised = min(start + spacing, now + RETRY_MAX)
            return wait
        # What lies beyond the longest wait cannot be promised; those clients spread over the last
        # stretch instead of being given one common moment, still not before room is expected.
        earliest = RETRY_MAX * 0.75 if room >= RETRY_MAX else max(RETRY_MAX * 0.75, room)
        return earliest + (RETRY_MAX - earliest) * draw

    def _seconds_per_block(self, now: Seconds) -> Seconds:
        """One over the drain rate: expected life of what is held, over the blocks held."""
        if not self._ends:
            return 0.0
        blocks = sum(held for _, held in self._ends)
        return max(0.0, self._ends[-1][0] - now) / blocks if blocks else 0.0
