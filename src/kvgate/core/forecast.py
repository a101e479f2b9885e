"""When may a refused client come back? A first, honest estimate.

Each live reservation is expected to last `output cap x seconds per cap token`, where the factor is
learned from answers that completed (a cancelled or failed one must not teach that answers are
short). One that has lasted longer than expected is expected to go on for a share of its age.

Room for s blocks is expected when enough has ended for s and for all who were told to come back
before: they stand in a line of promises, each until its moment has passed. So refused clients do
not all come back at once, and one that comes back and is refused again does not count twice.

Whole-second headers and their limits belong to `wire`; this file deals in seconds.
"""

from __future__ import annotations

from heapq import heappop, heappush

from kvgate.core.records import Key, Seconds

# Before the first answer completes: 50 tokens/s a stream, a common speed of engines under load.
SECONDS_PER_TOKEN_COLD = 0.02
# Weight of the newest answer, once there are ten: about 20 answers make up the memory.
LEARNING_RATE = 0.1
# How much longer an overdue answer is expected to last, as a share of its age. It is probably near
# its cap; expecting it at any moment would have its clients come back every second.
OVERDUE_SHARE = 0.25
# Clients must not be told to come back sooner or later than this (docs/refusals.md says why).
RETRY_MIN: Seconds = 1.0
RETRY_MAX: Seconds = 60.0
# Between two promised moments, where room for both comes at once: 20 clients a second.
PROMISE_GAP: Seconds = 0.05
# Promises remembered at once; those who hammer cannot grow the list without end.
PROMISES_MAX = 4096


class Forecast:
    """Expected ends of the live reservations, and the slots already promised."""

    __slots__ = (
        "_dirty",
        "_ends",
        "_held",
        "_latest",
        "_learned",
        "_live",
        "_promised_blocks",
        "_promises",
        "seconds_per_cap_token",
    )

    def __init__(self) -> None:
        self.seconds_per_cap_token = SECONDS_PER_TOKEN_COLD
        self._learned = 0
        self._live: dict[Key, tuple[Seconds, int, int]] = {}
        self._ends: list[tuple[Seconds, int, Seconds]] = []  # (expected end, blocks, start), by end
        self._dirty = False
        self._held = 0  # blocks of all that is live
        self._promises: list[tuple[Seconds, int]] = []  # a heap of (moment, blocks)
        self._promised_blocks = 0
        self._latest: Seconds = 0.0

    def started(self, key: Key, output_cap: int, blocks: int, now: Seconds) -> None:
        self._live[key] = (now, output_cap, blocks)
        self._held += blocks
        self._dirty = True

    def settled(self, key: Key, blocks: int) -> None:
        """It holds fewer blocks now, so that fewer will come free at its end."""
        started, output_cap, held = self._live[key]
        self._live[key] = (started, output_cap, blocks)
        self._held += blocks - held
        self._dirty = True

    def ended(self, key: Key, now: Seconds, *, learn: bool) -> None:
        live = self._live.pop(key, None)
        if live is None:
            return
        self._dirty = True
        self._held -= live[2]
        if learn:
            started, output_cap, _ = live
            sample = max(0.0, now - started) / max(1, output_cap)
            self._learned += 1
            rate = max(LEARNING_RATE, 1 / self._learned)
            self.seconds_per_cap_token += rate * (sample - self.seconds_per_cap_token)

    def room_in(self, blocks: int, now: Seconds) -> Seconds:
        """Seconds until `blocks` more are expected to have come free; O(live).

        More than is live comes free in later rounds, each as long as the last expected end.
        """
        ends = self._expected_ends(now)
        if blocks <= 0 or self._held <= 0:
            return 0.0
        rounds, rest = divmod(blocks - 1, self._held)
        wait = rounds * max(0.0, ends[-1][0] - now)
        freed = 0
        for end, held, _ in ends:
            freed += held
            if freed > rest:
                return wait + max(0.0, end - now)
        raise AssertionError("the rest is smaller than what is held")

    def slot(self, blocks: int, short: int, now: Seconds, draw: float) -> Seconds:
        """Seconds after which a refused client that needs `blocks` should come back.

        `short`: blocks missing now. `draw` in [0, 1) adds up to half of the time that the client's
        own blocks take to come free, so the answer is never earlier than the forecast.
        """
        while self._promises and self._promises[0][0] <= now:
            self._promised_blocks -= heappop(self._promises)[1]
        room = self.room_in(short + self._promised_blocks, now)
        start = max(RETRY_MIN, room, self._latest + PROMISE_GAP - now)
        wait = start + draw * max(blocks * self._seconds_per_block(now) / 2, 0.25)
        if wait < RETRY_MAX:
            self._latest = now + start
            if len(self._promises) < PROMISES_MAX:
                heappush(self._promises, (now + wait, blocks))
                self._promised_blocks += blocks
            return wait
        # What lies beyond the longest wait cannot be promised; those clients spread over the last
        # stretch instead of being given one common moment, still not before room is expected.
        own = self.room_in(short, now)
        earliest = RETRY_MAX * 0.75 if own >= RETRY_MAX else max(RETRY_MAX * 0.75, own)
        return earliest + (RETRY_MAX - earliest) * draw

    def _expected_ends(self, now: Seconds) -> list[tuple[Seconds, int, Seconds]]:
        """The live reservations by expected end; those that are overdue are moved on."""
        if self._dirty:
            factor = self.seconds_per_cap_token
            self._ends = sorted(
                (start + cap * factor, held, start) for start, cap, held in self._live.values()
            )
            self._dirty = False
        if not self._ends or self._ends[0][0] > now:
            return self._ends
        return sorted(
            (end if end > now else now + OVERDUE_SHARE * (now - start), held, start)
            for end, held, start in self._ends
        )

    def _seconds_per_block(self, now: Seconds) -> Seconds:
        """One over the drain rate: expected life of what is held, over the blocks held."""
        ends = self._expected_ends(now)
        return max(0.0, ends[-1][0] - now) / self._held if self._held else 0.0
