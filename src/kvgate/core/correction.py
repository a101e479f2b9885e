"""How much of the pool may be reserved, corrected by what the engine shows of itself.

The books are the ledger's; what the engine shows is only a check on them. More in use than is
reserved, or more sequences at work than were sent, means a foreign client, drift, or a price that is
too low; a preemption means that the cache overflowed. Then less may be reserved, at once; without
either it becomes more again, slowly.

Blocks alone do not show all that a foreign client has: those of ours that have not grown yet hide as
much. So sequences count, too: while more are at work than were sent, at least what was seen of theirs
is held back, down to nothing where they have everything, and for a minute after. Use above the
ledger without them may be the engine's own way of counting, and is held back down to `floor` only.

Promises: the fraction is never above `ceiling`, nor, unless foreign sequences were seen, below `floor`;
it rises only on evidence, which a missing, blind or implausible look is not; without looks for `STALE`
seconds it falls back to `start`, and no lower. It may be less than what is reserved: that stays
held, and nobody is let in until as much has ended. If it were held up to what is reserved, a busy
pool would take a new request for each that ends, and nothing would ever be held back.
"""

from __future__ import annotations

import math
from collections import deque
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
# As little as a fraction can be: no block of any pool.
NOTHING = 1e-9
# For so long after foreign sequences were last seen to have that much, it is held back for them; twice
# as long each time that they come again within `COMES_AGAIN` of that.
KEPT: Seconds = 60.0
KEPT_LONGEST: Seconds = 600.0
COMES_AGAIN = 10.0
# A share of the pool is rounded to a block.
ROUNDING = 1
# Where many come and go, a page lags behind the books by a few.
SEQS_OF_ONE_LAG = 8


@dataclass(frozen=True, slots=True)
class Look:
    """What one look showed. Figures that the engine does not give are None.

    `reserved`: blocks held in the ledger, the most of the moments before and after the look, with what
    is kept back for all requests together; `total`: blocks of the pool. `running`: sequences that the
    engine works on, `each`: the blocks of each, or those it may reach, where they are told one by one;
    `sent`: sequences held in the ledger, the most of both moments.
    """

    now: Seconds
    reserved: int
    total: int
    used: int | None = None
    preemptions: int | None = None
    running: int | None = None
    sent: int = 0
    each: tuple[int, ...] | None = None


class Correction:
    """The fraction of one pool, from look to look.

    `own`: what it would be without foreign sequences; `held_back`: blocks for those.
    `start`: the operator's fraction. `ceiling`: the most that it may become, 1.0 for `auto` where
    capacity and price are the engine's own to the block, else `start`.
    """

    def __init__(self, start: float = START, ceiling: float | None = None, floor: float = FLOOR) -> None:
        ceiling = start if ceiling is None else ceiling
        if not 0.0 < start <= ceiling <= 1.0:
            raise Misuse(f"0 < start <= ceiling <= 1 must hold, got {start} and {ceiling}")
        self.start, self.ceiling, self.floor = start, ceiling, min(floor, start)
        self.fraction = self.own = start
        self.held_back = 0
        self.pace = PACE_FIRST
        self.preemptions = 0
        self.overuses = 0
        self.excess = 0  # blocks in use beyond what is reserved, at the last look
        self.foreign_seqs = 0  # sequences at work beyond those sent, at the last look
        self.foreign_blocks = 0  # what is taken for theirs
        self.last_look: Seconds | None = None
        self._counter: int | None = None
        self._over_in_a_row = 0
        self._rose: Seconds | None = None
        # What foreign sequences had, the latest of each size and no smaller one before a larger; how long
        # that is kept for them, and when nothing was any more. In seconds of a clock that stands still
        # while there is nothing to see.
        self._theirs_at: deque[tuple[Seconds, int]] = deque()
        self._keep = KEPT
        self._let_go: Seconds | None = None
        self._seen: Seconds = 0.0
        self._saw: Seconds | None = None

    def look(self, look: Look) -> float:
        """Take in one look; returns the fraction that holds from now on."""
        if look.used is None and look.preemptions is None:
            return self.blind(look.now)
        self._seen += look.now - self._saw if self._saw is not None else 0.0
        self.last_look = self._saw = look.now
        fresh = self._new_preemptions(look.preemptions)
        over = self._is_over(look)
        before = self.own
        self.overuses += over
        if over and self.foreign_seqs:
            self._hold_back(self.foreign_blocks)
        elif not self.foreign_blocks:
            self._hold_back(0)
        if fresh or (over and not self.foreign_seqs):
            self._step_down(look, fresh, over)
        if self.own < before or fresh or (self.foreign_blocks and (self.foreign_seqs or not over)):
            self._rose = look.now
        else:
            left = self._left(self.foreign_blocks, look.total)
            self._rise(look, left if over else self.start if self.held_back else self.ceiling)
        return self._settle(look.total)

    def blind(self, now: Seconds) -> float:
        """There was nothing to see. Nothing is learned; what was gained by looking is lost in time."""
        self._over_in_a_row = 0
        self._rose = self._saw = now
        if self.last_look is not None and now - self.last_look >= STALE:
            self.own = min(self.own, self.start)
            self.fraction = min(self.fraction, self.own)
        return self.fraction

    def _settle(self, total: int) -> float:
        self.fraction = self.own
        if self.held_back:
            self.fraction = max(NOTHING, min(self.own, self._left(self.held_back, total)))
        return self.fraction

    def _hold_back(self, blocks: int) -> None:
        """Foreign sequences have `blocks` now: the most of the time just past is held back for them."""
        theirs, now = self._theirs_at, self._seen
        if blocks and not theirs:
            again = self._let_go is not None and now - self._let_go < COMES_AGAIN * self._keep
            self._keep = min(KEPT_LONGEST, 2 * self._keep) if again else KEPT
        while theirs and theirs[-1][1] <= blocks:
            theirs.pop()
        if blocks:
            theirs.append((now, blocks))
        while theirs and now - theirs[0][0] >= self._keep:
            theirs.popleft()
            self._let_go = now
        self.held_back = theirs[0][1] if theirs else 0

    def _step_down(self, look: Look, fresh: int, over: bool) -> None:
        is_ours = over and not self.foreign_seqs
        if fresh or self._over_in_a_row == LOOKS_TO_BELIEVE:  # and not while the same thing goes on
            self.pace = min(PACE_LONGEST, self.pace * 2)
        if is_ours:
            # One reading is enough to know how much.
            self.own = min(self.own, max(self.floor, self._left(self.foreign_blocks, look.total)))
        if fresh and self.held_back:
            # They take more than is seen of them. It comes back with the rest.
            most = max(self.held_back, int((self.start - self.floor) * look.total))
            self._hold_back(min(most, self.held_back + math.ceil(STEP_DOWN * look.total)))
        elif fresh:
            self.own = min(self.own, max(self.floor, self.own - STEP_DOWN))

    def _new_preemptions(self, counter: int | None) -> int:
        before, self._counter = self._counter, self._counter if counter is None else counter
        # A counter that is lower than before is that of an engine that has started anew.
        if counter is None or before is None or counter <= before:
            return 0
        self.preemptions += counter - before
        return counter - before

    def _is_over(self, look: Look) -> bool:
        used = look.used or 0
        above = used - look.reserved
        self.excess = above if above > ROUNDING else 0
        more = 0 if look.running is None else look.running - look.sent
        self.foreign_seqs = more if more > look.sent // SEQS_OF_ONE_LAG else 0
        self.foreign_blocks = max(self.excess, self._theirs(look, used))
        self._over_in_a_row = self._over_in_a_row + 1 if self.foreign_blocks else 0
        return self._over_in_a_row >= LOOKS_TO_BELIEVE

    def _theirs(self, look: Look, used: int) -> int:
        """Blocks of foreign sequences. Which sequences they are is not shown."""
        if not self.foreign_seqs or not look.running:
            return 0
        if look.each is not None:
            return sum(sorted(look.each, reverse=True)[: self.foreign_seqs])  # at most
        return -(-used * self.foreign_seqs // look.running)  # their part of all

    def _left(self, blocks: int, total: int) -> float:
        """The fraction that somebody else's blocks leave over."""
        return self.start - blocks / max(1, total)

    def _rise(self, look: Look, most: float) -> None:
        if self.own >= most:
            return
        # Up to `start` it rises by itself; beyond, only a full pool shows that there is more.
        if self.own >= self.start and not self._is_evidence(look):
            self._rose = look.now
            return
        if self._rose is None:
            self._rose = look.now
        steps = int((look.now - self._rose) / self.pace)
        if steps > 0:
            # One step a look: evidence for more has not been seen.
            self.own = min(most, self.own + STEP_UP)
            self.pace = max(PACE_FIRST, self.pace * PACE_EASES)
            self._rose = look.now

    def _is_evidence(self, look: Look) -> bool:
        is_full = look.reserved >= FULL_ENOUGH * self.own * look.total
        # A page that shows an empty pool under load is not the engine's word of now.
        return is_full and bool(look.used) and look.preemptions is not None
