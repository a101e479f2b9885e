"""Looks at an engine every few seconds and corrects how much of its pool may be reserved.

Promises: the ledger is never set from what the engine shows; an engine that cannot be looked at is
treated as before; a look takes at most `LOOK_SECONDS` and never fails its caller.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, Protocol

from kvgate.core.correction import FLOOR, START, Correction, Look
from kvgate.core.gate import Gate
from kvgate.core.price import blocks_for
from kvgate.core.records import PoolFacts
from kvgate.edge import clock
from kvgate.edge.relay.pool import EnginePool, EngineUnavailable
from kvgate.edge.upstreams.discovery import pool_fetch
from kvgate.wire.engines.found import Page
from kvgate.wire.engines.sights import LOOKS, Sight, sight_in

LOOK_SECONDS = 2.0
PERIOD_SECONDS = 3.0
# A resize looks at everyone who waits: to give back less than this is not worth that.
SMALLEST_CHANGE = 0.004


class Watched(Protocol):
    """What is looked at, an upstream: `resize` tells all that follow the size of its pool."""

    gate: Gate
    pool: EnginePool
    drift: Drift | None

    def resize(self, facts: PoolFacts) -> None: ...


class Drift:
    """The correction of one pool.

    `safety_fraction`: the operator's, or None for `auto`: then it starts at 0.90 and, where
    `is_exact`, may rise to 1.00. `is_on`: off only shows what is seen. `rank`: the label of one
    data-parallel rank.
    """

    def __init__(
        self,
        engine: str,
        facts: PoolFacts,
        *,
        safety_fraction: float | None = None,
        is_exact: bool = False,
        is_on: bool = True,
        rank: str | None = None,
    ) -> None:
        self.engine = engine
        self.rank = rank
        self.is_on = is_on
        self.is_exact = is_exact
        self.is_auto = safety_fraction is None
        start = START if safety_fraction is None else safety_fraction
        start = max(start, facts.safety_fraction) if engine == "ollama" else start
        ceiling = 1.0 if self.is_auto and is_exact else start
        # One request of a whole context must stay possible, or it would wait for ever where the engine
        # only counts in another way; what foreign sequences hold is held back whatever it leaves.
        kept = 0 if facts.geometry is None else facts.geometry.reserve_blocks
        whole = (blocks_for(1, facts.context, facts) + kept) / facts.total_blocks
        floor = max(FLOOR, whole) if whole <= start else start
        self.correction = Correction(start, ceiling, floor)
        self.sight = Sight()
        self.looks = self.blind_looks = 0

    @property
    def can_look(self) -> bool:
        return self.engine in LOOKS

    async def look(self, upstream: Watched) -> None:
        """Look once; tell the gate where the fraction has changed."""
        if not self.can_look:
            return
        ledger = upstream.gate.ledger
        blocks, seqs = ledger.reserved_blocks, ledger.reserved_seqs
        page = await self._page(upstream.pool)
        sight = sight_in(self.engine, {LOOKS[self.engine]: page}, upstream.gate.facts, self.rank)
        if upstream.drift is not self:
            return  # other limits hold by now
        self.take(sight, max(blocks, ledger.reserved_blocks), max(seqs, ledger.reserved_seqs), upstream)

    def take(self, sight: Sight, reserved: int, sent: int, upstream: Watched) -> None:
        """Take in what was seen while at most `reserved` blocks and `sent` sequences were held."""
        facts = upstream.gate.facts
        self.sight = sight
        self.looks += 1
        self.blind_looks += sight.is_blind
        kept = 0 if facts.geometry is None else facts.geometry.reserve_blocks
        fraction = self.correction.look(
            Look(
                clock.now(),
                reserved + kept,
                facts.total_blocks,
                sight.used_blocks,
                sight.preemptions,
                running=sight.running,
                sent=sent,
                each=sight.each,
            )
        )
        change = fraction - facts.safety_fraction
        is_whole = not self.correction.held_back  # nothing more will come back by itself
        if self.is_on and (change < 0 or change >= SMALLEST_CHANGE or (change > 0 and is_whole)):
            ceiling = max(fraction, self.correction.ceiling)
            upstream.resize(replace(facts, safety_fraction=fraction, most_fraction=ceiling))

    async def _page(self, pool: EnginePool) -> Page:
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                return Page(*await pool_fetch(pool)("GET", LOOKS[self.engine], None))
        except (OSError, EngineUnavailable, TimeoutError) as failed:
            return Page(0, str(failed))

    def snapshot(self) -> dict[str, Any]:
        """For `/status` and `/metrics`."""
        seen = self.correction
        return {
            "is_on": self.is_on,
            "auto": self.is_auto,
            "fraction": round(seen.fraction, 4),
            "ceiling": seen.ceiling,
            "engine_used_blocks": self.sight.used_blocks,
            "engine_running": self.sight.running,
            "excess_blocks": seen.excess,
            "foreign_seqs": seen.foreign_seqs,
            "foreign_blocks": seen.foreign_blocks,
            "held_back_blocks": seen.held_back,
            "preemptions": seen.preemptions,
            "overuses": seen.overuses,
            "looks": self.looks,
            "blind_looks": self.blind_looks,
            "seconds_since_look": None if seen.last_look is None else round(clock.now() - seen.last_look, 1),
        }
