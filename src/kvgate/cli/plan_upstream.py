"""An engine that runs, for `kvgate plan`: its pool in place of hardware, priced as the gateway prices it.

Promises: what the engine's pages and the operator tell is planned; what they do not tell is in
`unknown` or among the notes, and is not guessed at. The pages are read once; what another safety
fraction would make of them is worked out from the same text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import click

from kvgate.cli.plan_figures import ShapeOf, held, layout_figures, pool_figures, shapes_within
from kvgate.core.geometry import UnknownGeometry
from kvgate.core.geometry.capacity import Held
from kvgate.core.price import blocks_for
from kvgate.core.records import PoolFacts
from kvgate.edge.relay.pool import EnginePool
from kvgate.edge.tls import engine_context
from kvgate.edge.upstreams.access import Access
from kvgate.edge.upstreams.discovery import Found, Given, Page, pages_of, pool_fetch, told_by
from kvgate.wire.engines.known import ENGINES

CONNECT_SECONDS = 5.0


class RunningPool:
    """The pool of one engine, or of one rank of it, at any safety fraction.

    `read`: what the engine's pages come to at a fraction; `facts`: those at the fraction asked for.
    """

    def __init__(self, read: Callable[[float], Found], facts: PoolFacts, safety_fraction: float) -> None:
        self._read = read
        self._known = {safety_fraction: facts}
        self._asked = safety_fraction
        self.total_blocks, self.context, self.max_seqs = facts.total_blocks, facts.context, facts.max_seqs

    def facts(self, safety_fraction: float) -> PoolFacts:
        """The pool as `kvgate serve --safety-fraction` would have it."""
        if safety_fraction not in self._known:
            asked = self._known[self._asked]
            found = self._read(safety_fraction).facts
            self._known[safety_fraction] = found or replace(asked, safety_fraction=safety_fraction)
        return self._known[safety_fraction]

    def usable(self, safety_fraction: float) -> int:
        return self.facts(safety_fraction).usable_blocks

    def holds(self, prompt_tokens: int, output_cap: int | None, safety_fraction: float) -> Held:
        """How many requests of this shape fit; an unset cap is the rest of the context."""
        facts = self.facts(safety_fraction)
        rest = facts.context - prompt_tokens
        if rest < 1:
            if safety_fraction != self._asked:
                return Held(prompt_tokens, output_cap or 0, 0, 0, 0)  # a smaller pool, a shorter context
            raise UnknownGeometry(
                f"a prompt of {prompt_tokens:,} tokens fills the context of {facts.context:,}: nothing can "
                "be generated"
            )
        cap = rest if output_cap is None else min(output_cap, rest)
        peak = final = blocks_for(prompt_tokens, cap, facts)
        if facts.geometry is not None:
            final = facts.geometry.blocks(prompt_tokens, cap, facts.engine_context).final
        fit = facts.usable_blocks // peak
        return Held(
            prompt_tokens, cap, peak, final, fit if facts.max_seqs is None else min(fit, facts.max_seqs)
        )


@dataclass(frozen=True)
class Engine:
    """What was found at an address. `pool`: None where something that is needed is not known."""

    found: Found
    pool: RunningPool | None
    if_split: RunningPool | None


def ask(url: str, engine: str | None, given: Given, key: str | None, ca: str | None) -> Engine:
    """Ask the engine at `url` for its pages. Raises `ClickException` where it does not answer."""
    pages = asyncio.run(_pages(url, engine, key, ca))

    def read(fraction: float, *, total: int | None = None) -> Found:
        return told_by(
            pages,
            engine,
            replace(given, safety_fraction=fraction, total_blocks=total or given.total_blocks),
        )

    found = read(given.safety_fraction)
    if not found.is_up:
        raise click.ClickException("; ".join(found.unknown))
    facts = found.facts
    if facts is None:
        return Engine(found, None, None)
    pool, split = RunningPool(read, facts, given.safety_fraction), None
    if any(finding.code == "unified_or_split" for finding in found.warnings):
        # The size that was read is one slot's; a split cache has as much for each.
        total = facts.total_blocks * (facts.max_seqs or 1)
        other = read(given.safety_fraction, total=total).facts
        if other is not None:
            split = RunningPool(lambda fraction: read(fraction, total=total), other, given.safety_fraction)
    return Engine(found, pool, split)


def engine_figures(
    url: str, engine: Engine, shapes: tuple[ShapeOf, ...], safety_fraction: float
) -> dict[str, Any]:
    """Everything about the engine and its pool, ready for JSON."""
    found, facts = engine.found, engine.found.facts
    figures: dict[str, Any] = {
        "url": url,
        "engine": found.engine,
        "version": found.version,
        "models": list(found.models),
        "ranks": found.ranks,
        "exact": found.is_exact,
        "context": found.context,
        "sources": dict(found.sources),
        "unknown": list(found.unknown),
        "cannot_know": list(ENGINES[found.engine].cannot_know),
        "findings": [
            {"code": each.code, "level": each.level.value, "what": each.what, "fix": each.fix}
            for each in found.warnings
        ],
    }
    if engine.pool is None or facts is None:
        return figures
    pool = engine.pool
    shapes = shapes or shapes_within(pool.context)
    figures |= {"block_size": facts.block_size, "max_seqs": facts.max_seqs, "lookahead": facts.lookahead}
    figures["whole_slots"] = ENGINES[found.engine].is_partitioned
    if facts.geometry is not None:
        figures |= layout_figures(facts.geometry)
    figures |= pool_figures(pool, shapes, safety_fraction)
    if engine.if_split is not None:
        figures["if_split"] = {
            "total_blocks": engine.if_split.total_blocks,
            "usable_blocks": engine.if_split.usable(safety_fraction),
            "context": engine.if_split.context,
            "shapes": held(engine.if_split, shapes, safety_fraction),
        }
    return figures


async def _pages(url: str, engine: str | None, key: str | None, ca: str | None) -> dict[str, Page]:
    loop = asyncio.get_running_loop()
    tls = engine_context(ca) if url.startswith("https:") else None
    pool = EnginePool(url, loop, connect_timeout=CONNECT_SECONDS, idle_timeout=CONNECT_SECONDS, tls=tls)
    pool.access = Access(key)
    try:
        return await pages_of(pool_fetch(pool), engine)
    finally:
        pool.close()
