"""When will there be room, and when should each refused client come back?

*Probably*: each live reservation is expected to end at a quantile of the lives of earlier answers
like it (`lifetimes`: same tenant and size of cap, else same size of cap, else all), given the age it
has reached. While too little is known, at `output cap x seconds per cap token`, a factor learned
from the first answers. *Surely*: at the cap, at the slowest pace that was seen lately.

Room for s blocks is expected at the first moment by which enough has ended for s and for all who
were told to come back until then: each promise stands until its moment has passed. So refused
clients do not all come back at once, one that comes back and is refused again does not count twice,
and a late moment promised on a wrong guess does not send later clients behind it.

Whole-second headers and their limits belong to `wire`; this file deals in seconds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from functools import lru_cache

from kvgate.core.lifetimes import Lifetimes
from kvgate.core.records import Key, Seconds

# Before the first answer completes: 50 tokens/s a stream, a common speed of engines under load.
SECONDS_PER_TOKEN_COLD = 0.02
# And no answer is expected to last longer than this then: most caps are far above what is used, and a
# client sent away for a minute on a guess is not there when the engine turns out to be fast. Longer
# ones are expected anew as they grow older.
COLD_LIFE_MAX: Seconds = 4.0
# Weight of the newest answer, once there are ten: about 20 answers make up the memory.
LEARNING_RATE = 0.1
# How fast the slowest pace seen is forgotten.
SLOWEST_DECAY = 0.02
# The share of answers that have ended by the moment called probable. Measured by `lab.retry_study` at
# 0.5, 0.6, 0.7 and 0.9: of those, 0.7 has fewer failures in bursts than every constant, for the waits.
PROBABLE = 0.7
# How much longer an overdue answer is expected to last, as a share of its age. It is probably near
# its cap; expecting it at any moment would have its clients come back every second.
OVERDUE_SHARE = 0.25
OVERDUE_MIN: Seconds = 0.05
# Completed answers before an estimate is more than a guess.
COLD = 5
# A change of the learned factor by this much moves every expected end.
REFRESH_SHARE = 0.2
# Clients must not be told to come back sooner or later than this (docs/refusals.md says why).
RETRY_MIN: Seconds = 1.0
RETRY_MAX: Seconds = 60.0
# Between two promised moments, where room for both comes at once: 20 clients a second.
PROMISE_GAP: Seconds = 0.05
# Promises are remembered by the second, so those who hammer cannot make them grow without end.
SECONDS_KEPT = int(RETRY_MAX) + 2
# Curves kept at once: 64 tenants with a dozen sizes of cap each.
CURVES_MAX = 768


@dataclass(slots=True)
class _Live:
    start: Seconds
    cap: int
    blocks: int
    tenant: str
    end: Seconds  # as expected when it was last looked at


class Forecast:
    """Expected ends of the live reservations, and the slots already promised."""

    __slots__ = (
        "_basis",
        "_curves",
        "_ends",
        "_first_second",
        "_freed",
        "_held",
        "_latest",
        "_learned",
        "_live",
        "_promised",
        "seconds_per_cap_token",
        "slowest_token",
    )

    def __init__(self) -> None:
        self.seconds_per_cap_token = SECONDS_PER_TOKEN_COLD
        self.slowest_token = SECONDS_PER_TOKEN_COLD
        self._basis = SECONDS_PER_TOKEN_COLD
        self._learned = 0
        self._curves: dict[tuple[str, int], Lifetimes] = {}
        self._live: dict[Key, _Live] = {}
        self._ends: list[tuple[Seconds, Key]] = []  # in order
        self._freed: list[int] = []  # blocks of all up to each of the first of them, as far as asked
        self._held = 0  # blocks of all that is live
        self._first_second = 0  # that the two lists below begin with
        self._promised = [0] * SECONDS_KEPT  # blocks, by second
        self._latest = [0.0] * SECONDS_KEPT  # the latest moment in it, before chance was added

    # --- what happens

    def started(self, key: Key, output_cap: int, blocks: int, now: Seconds, tenant: str = "") -> Seconds:
        """A reservation of `blocks` was granted; its answer has at most `output_cap` tokens.

        Returns how long it is expected to live.
        """
        life = self.expected_life(output_cap, tenant)
        end = now + life
        self._live[key] = _Live(now, output_cap, blocks, tenant, end)
        at = bisect_left(self._ends, (end, key))
        self._ends.insert(at, (end, key))
        del self._freed[at:]
        self._held += blocks
        return life

    def settled(self, key: Key, blocks: int) -> None:
        """It holds fewer blocks now, so that fewer will come free at its end."""
        live = self._live[key]
        del self._freed[bisect_left(self._ends, (live.end, key)) :]
        self._held += blocks - live.blocks
        live.blocks = blocks

    def ended(self, key: Key, now: Seconds, *, learn: bool, tokens: int | None = None) -> None:
        """It has ended. `learn`: by itself, not cut off. `tokens`: how many it generated, if known."""
        live = self._live.pop(key, None)
        if live is None:
            return
        place = bisect_left(self._ends, (live.end, key))
        del self._ends[place], self._freed[place:]
        self._held -= live.blocks
        cap = live.cap
        age = now - live.start if now > live.start else 0.0
        for at in _curve_names(live.tenant, cap.bit_length()):
            curve = self._curves.get(at)
            if curve is None:
                if len(self._curves) >= CURVES_MAX:
                    continue
                curve = self._curves[at] = Lifetimes(PROBABLE)
            curve.observe(age, completed=learn)
        if learn:
            self._learn(age, cap, tokens)

    def _learn(self, age: Seconds, cap: int, tokens: int | None) -> None:
        sample = age / (cap or 1)
        self._learned += 1
        rate = max(LEARNING_RATE, 1 / self._learned)
        self.seconds_per_cap_token += rate * (sample - self.seconds_per_cap_token)
        pace = age / tokens if tokens else sample
        if self._learned == 1:
            self.slowest_token = pace
        self.slowest_token = max(pace, self.slowest_token + SLOWEST_DECAY * (pace - self.slowest_token))
        if self._learned == 1 or abs(self.seconds_per_cap_token - self._basis) > REFRESH_SHARE * self._basis:
            self._expect_anew()

    # --- what is expected

    @property
    def is_cold(self) -> bool:
        """True until a few answers have completed: estimates are guesses."""
        return self._learned < COLD

    def expected_life(self, output_cap: int, tenant: str = "", age: Seconds = 0.0) -> Seconds:
        """The age by which such an answer has probably ended, if it has reached `age` already."""
        for at in _curve_names(tenant, output_cap.bit_length()):
            curve = self._curves.get(at)
            if curve is not None and (life := curve.end_given(age)) is not None:
                # An edge of a bin may lie a little before the age itself.
                return max(life, age)
        life = output_cap * self.seconds_per_cap_token
        if not self._learned:
            life = min(life, COLD_LIFE_MAX)
        return life if life > age else age * (1 + OVERDUE_SHARE)

    def room_in(self, blocks: int, now: Seconds) -> Seconds:
        """Seconds until `blocks` more have probably come free; O(those that end before), once.

        More than is live comes free in later rounds, each as long as the last expected end.
        """
        if blocks <= 0 or self._held <= 0:
            return 0.0
        self._move_overdue(now)
        rounds, rest = divmod(blocks - 1, self._held)
        wait = rounds * max(0.0, self._ends[-1][0] - now)
        freed = self._freed
        while not freed or freed[-1] <= rest:
            freed.append((freed[-1] if freed else 0) + self._live[self._ends[len(freed)][1]].blocks)
        return wait + max(0.0, self._ends[bisect_right(freed, rest)][0] - now)

    def room_surely_in(self, blocks: int, now: Seconds) -> Seconds:
        """Seconds until `blocks` more are free even if every answer goes on to its cap; O(live log live).

        True as long as no stream is slower than the slowest pace seen lately. Infinite where more
        is asked than is live.
        """
        if blocks <= 0:
            return 0.0
        freed = 0
        for end, held in sorted(
            (a.start + a.cap * self.slowest_token, a.blocks) for a in self._live.values()
        ):
            freed += held
            if freed >= blocks:
                return max(0.0, end - now)
        return float("inf")

    def slot(self, blocks: int, short: int | None, now: Seconds, draw: float) -> Seconds:
        """Seconds after which a refused client that needs `blocks` should come back.

        `short`: blocks missing now; None where nothing that ends makes room, because too much of the pool
        is held back. `draw` in [0, 1) adds up to half of the time that the client's own blocks take to come
        free, so the answer is never earlier than the forecast.
        """
        if short is None:
            return RETRY_MAX * (0.75 + 0.25 * draw)
        start = self._gap(short, now)
        wait = start + draw * max(blocks * self._seconds_per_block(now) / 2, 0.25)
        if wait < RETRY_MAX:
            self._latest[int(now + start) - self._first_second] = now + start
            self._promised[int(now + wait) - self._first_second] += blocks
            return wait
        # What lies beyond the longest wait cannot be promised; those clients spread over the last
        # stretch instead of being given one common moment, still not before room is expected.
        own = self.room_in(short, now)
        earliest = RETRY_MAX * 0.75 if own >= RETRY_MAX else max(RETRY_MAX * 0.75, own)
        return earliest + (RETRY_MAX - earliest) * draw

    def _gap(self, short: int, now: Seconds) -> Seconds:
        """Seconds until there is room for `short` blocks beside what was promised until then."""
        self._forget_promises_before(int(now))
        start = max(RETRY_MIN, self.room_in(short, now))
        wanted, counted = short, 0
        while start < RETRY_MAX:
            at = int(now + start) - self._first_second
            more = sum(self._promised[counted : at + 1])
            counted = at + 1
            if more:
                wanted += more
                start = max(start, self.room_in(wanted, now))
            if self._latest[at]:
                start = max(start, self._latest[at] + PROMISE_GAP - now)
            if now + start < self._first_second + counted:
                break
        return start

    def _forget_promises_before(self, second: int) -> None:
        passed = min(second - self._first_second, SECONDS_KEPT)
        if passed > 0:
            self._first_second = second
            for kept in (self._promised, self._latest):
                del kept[:passed]
                kept.extend([0] * passed)

    def _move_overdue(self, now: Seconds) -> None:
        """Those that should have ended are expected anew, given the age they have reached."""
        ends = self._ends
        if ends and ends[0][0] <= now:
            self._freed.clear()
        while ends and ends[0][0] <= now:
            key = ends.pop(0)[1]
            live = self._live[key]
            age = now - live.start
            end = live.start + self.expected_life(live.cap, live.tenant, age)
            # Never "right now": the moment of an overdue answer is not known that well.
            end = max(end, now + OVERDUE_SHARE * age, now + OVERDUE_MIN)
            live.end = end
            insort(ends, (end, key))

    def _expect_anew(self) -> None:
        self._basis = self.seconds_per_cap_token
        for live in self._live.values():
            live.end = live.start + self.expected_life(live.cap, live.tenant)
        self._freed.clear()
        self._ends = sorted((live.end, key) for key, live in self._live.items())

    def _seconds_per_block(self, now: Seconds) -> Seconds:
        """One over the drain rate: expected life of what is held, over the blocks held."""
        return max(0.0, self._ends[-1][0] - now) / self._held if self._held else 0.0


@lru_cache(CURVES_MAX)
def _curve_names(tenant: str, size: int) -> tuple[tuple[str, int], ...]:
    """The curves that an answer belongs to, the most alike first. `size`: bits of its cap."""
    return ((tenant, size), ("", size), ("", 0)) if tenant else (("", size), ("", 0))
