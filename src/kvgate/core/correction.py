"""How much of the pool may be reserved, corrected by what the engine shows of itself.

The books are the ledger's; what the engine shows is only a check on them. More in use than is
reserved means a foreign client, drift, or a price that is too low; a preemption means that the cache
overflowed. Then less may be reserved, at once; without either it becomes more again, slowly.

Promises: the fraction is never above `ceiling`, and never below `floor` nor below what is reserved
already (as far as the ceiling allows it); it rises only on evidence, which a missing, blind or
implausible look is not; without looks for `STALE` seconds it falls back to `start`, and no lower.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvgate.core.records import Misuse, Seconds

# Where nothing was measured yet, this much is safe on every engine that was (docs/engines.md).
START = 0.90
# One preemption, or one look at more use than is reserved: this much less of the pool.
STEP_DOWN = 0.05
STEP_UP = 0.01
# The first step up takes this long; each step down doubles it, up to the longest; each step up eases it.
PACE_FIRST: Seconds = 5.0
PACE_LONGEST: Seconds = 300.0
PACE_EASES = 0.9
# An engine shows its figures some steps late: use is above the ledger only if it is so twice.
LOOKS_TO_BELIEVE = 2
STALE: Seconds = 30.0
# A pool that is filled less says nothing about what a full one does.
FULL_ENOUGH = 0.75
# Below this something else is wrong, and refusing everybody would not mend it.
FLOOR = 0.30


@dataclass(frozen=True, slots=True)
class Look:
    """What one look showed. Figures that the engine does not give are None.

    `reserved`: blocks held in the ledger, the most of the moments before and after the look,
    with what is kept back for all requests together; `held`: the same now (None: as `reserved`);
    `total`: blocks of the pool.
    """

    now: Seconds
    reserved: int
    total: int
    used: int | None = None
    preemptions: int | None = None
    held: int | None = None


class Correction:
    """The fraction of one pool, from look to look.

    `start`: the operator's fraction. `ceiling`: the most that it may become, 1.0 for `auto` where
    capacity and price are the engine's own to the block, else `start`.
    """

    def __init__(self, start: float = START, ceiling: float | None = None, floor: float = FLOOR) -> None:
        ceiling = start if ceiling is None else ceiling
        if not 0.0 < start <= ceiling <= 1.0:
            raise Misuse(f"0 < start <= ceiling <= 1 must hold, got {start} and {ceiling}")
        self.start, self.ceiling, self.floor = start, ceiling, min(floor, start)
        self.fraction = start
        self.pace = PACE_FIRST
        self.preemptions = 0
        self.overuses = 0
        self.excess = 0  # blocks in use beyond what is reserved, at the last look
        self.last_look: Seconds | None = None
        self._wanted = start
        self._counter: int | None = None
        self._over_in_a_row = 0
        self._rose: Seconds | None = None

    def look(self, look: Look) -> float:
        """Take in one look; returns the fraction that holds from now on."""
        if look.used is None and look.preemptions is None:
            return self.blind(look.now, look.reserved if look.held is None else look.held, look.total)
        self.last_look = look.now
        fresh = self._new_preemptions(look.preemptions)
        over = self._is_over(look)
        if fresh or over:
            self._step_down(look, fresh, over)
            self._rose = look.now
        elif self.excess:
            self._rose = look.now
        else:
            self._rise(look)
        return self._settle(look.reserved if look.held is None else look.held, look.total)

    def blind(self, now: Seconds, held: int, total: int) -> float:
        """There was nothing to see. Nothing is learned; what was gained by looking is lost in time."""
        self._over_in_a_row = 0
        self._rose = now
        if self.last_look is not None and now - self.last_look >= STALE:
            self._wanted = min(self._wanted, self.start)
        return self._settle(held, total)

    def _new_preemptions(self, counter: int | None) -> int:
        before, self._counter = self._counter, self._counter if counter is None else counter
        # A counter that is lower than before is that of an engine that has started anew.
        if counter is None or before is None or counter <= before:
            return 0
        self.preemptions += counter - before
        return counter - before

    def _is_over(self, look: Look) -> bool:
        self.excess = 0 if look.used is None else max(0, look.used - look.reserved - 1)
        self._over_in_a_row = self._over_in_a_row + 1 if self.excess else 0
        return self._over_in_a_row >= LOOKS_TO_BELIEVE

    def _step_down(self, look: Look, fresh: int, over: bool) -> None:
        if fresh or self._over_in_a_row == LOOKS_TO_BELIEVE:  # and not while the same thing goes on
            self.pace = min(PACE_LONGEST, self.pace * 2)
        if fresh:
            self._wanted -= STEP_DOWN
        if over:
            self.overuses += 1
            # What somebody else uses is not there for us; one reading is enough to know how much.
            self._wanted = min(self._wanted, self.start - self.excess / max(1, look.total))
        self._wanted = max(self.floor, self._wanted)

    def _rise(self, look: Look) -> None:
        if self._wanted >= self.ceiling:
            return
        # Up to `start` it rises by itself; beyond, only a full pool shows that there is more.
        if self._wanted >= self.start and not self._is_evidence(look):
            self._rose = look.now
            return
        if self._rose is None:
            self._rose = look.now
        steps = int((look.now - self._rose) / self.pace)
        if steps > 0:
            # One step a look: evidence for more has not been seen.
            self._wanted = min(self.ceiling, self._wanted + STEP_UP)
            self.pace = max(PACE_FIRST, self.pace * PACE_EASES)
            self._rose = look.now

    def _is_evidence(self, look: Look) -> bool:
        is_full = look.reserved >= FULL_ENOUGH * self.fraction * look.total
        # A page that shows an empty pool under load is not the engine's word of now.
        return is_full and bool(look.used) and look.preemptions is not None

    def _settle(self, held: int, total: int) -> float:
        # What is held is not cut off: the fraction follows it down, as requests end, to what is wanted.
        share = held / total if total else 0.0
        self.fraction = min(self.ceiling, max(self._wanted, share))
        return self.fraction
