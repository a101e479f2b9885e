"""Fills in what the operator has not said of an engine, by asking the engine; and watches what it shows.

Promises: the operator's figures beat what is read; a pool whose sizes cannot be known takes nothing,
and says which option gives them; after an outage the sizes are read again, and a doubtful reading
never raises them.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvgate.config import Settings, UpstreamSettings
from kvgate.core.geometry import Serving
from kvgate.edge.upstreams import discovery
from kvgate.edge.upstreams.discovery import Found, Given, Level, pool_fetch
from kvgate.edge.upstreams.drift import Drift
from kvgate.edge.upstreams.upstream import Upstream, engine_name, fraction_of, is_auto, sizes_of

_log = logging.getLogger("kvgate.upstream")


class SizesUnknown(ValueError):
    """An engine answers, but does not tell its sizes; the message names the options that give them."""


async def find(settings: Settings, ranks: Sequence[Upstream]) -> Found:
    """Ask one engine for what is not given, and resize its pools to it."""
    first = ranks[0]
    given = given_for(first.given, settings)
    name = engine_name(first.given, settings) or first.found_name
    found = await discovery.discover(pool_fetch(first.pool), name, given)
    for upstream in ranks:
        upstream.needs_key = found.needs_key
    if not found.is_up:
        return found
    _tell(first, found)
    facts = found.facts
    for upstream in ranks:
        if facts is None:
            upstream.unsized_why = "; ".join(found.unknown) or "its sizes are not known"
            continue
        if upstream.engine.name != found.engine:
            upstream.be(found.engine)
        upstream.found_name = found.engine
        upstream.resize(discovery.refreshed(upstream.facts, found) if upstream.is_sized else facts)
        watch(upstream, settings, is_exact=found.is_exact)
    return found


def watch(upstream: Upstream, settings: Settings, *, is_exact: bool | None = None) -> None:
    """Begin to compare the pool with what its engine shows, anew. `is_exact` None: as it was."""
    if is_exact is None:
        is_exact = upstream.drift is not None and upstream.drift.is_exact
    upstream.drift = Drift(
        upstream.engine.name,
        upstream.facts,
        safety_fraction=None if is_auto(upstream.given, settings) else fraction_of(upstream.given, settings),
        is_exact=is_exact,
        is_on=settings.watch_engine_metrics,
        rank=None if upstream.rank is None else str(upstream.rank),
    )


async def look(upstreams: Sequence[Upstream]) -> None:
    """Look at every pool once; all at the same time, each for a bounded time."""
    await asyncio.gather(
        *(
            upstream.drift.look(upstream)
            for upstream in upstreams
            if upstream.is_up and upstream.drift is not None
        )
    )


def given_for(given: UpstreamSettings, settings: Settings) -> Given:
    """The operator's figures for one engine."""
    config = given.model_config or settings.model_config
    sizes = sizes_of(given, settings)
    lookahead = settings.lookahead if given.lookahead is None else given.lookahead
    return Given(
        total_blocks=sizes["total_blocks"],
        block_size=sizes["block_size"],
        context=sizes["context"],
        max_seqs=sizes["max_seqs"],
        lookahead=lookahead,
        safety_fraction=fraction_of(given, settings),
        model_config=None if config is None else read_config(config),
        serving=None
        if config is None
        else Serving(
            tp=given.tensor_parallel or settings.tensor_parallel,
            pp=given.pipeline_parallel or settings.pipeline_parallel,
            max_batched_tokens=given.max_batched_tokens or settings.max_batched_tokens,
        ),
    )


def read_config(path: str) -> dict[str, Any]:
    """A model's config.json. Raises `ValueError`."""
    try:
        config = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as wrong:
        raise ValueError(f"--model-config {path}: {wrong}") from None
    if not isinstance(config, dict):
        raise ValueError(f"--model-config {path}: it is no JSON object")
    return config


def _tell(upstream: Upstream, found: Found) -> None:
    """Each warning once: it is in /status for as long as it holds."""
    told = {each["code"] for each in upstream.warnings}
    upstream.warnings = [
        {"code": each.code, "level": each.level.value, "what": each.what, "fix": each.fix}
        for each in found.warnings
        if each.level is not Level.NOTE
    ]
    for each in upstream.warnings:
        if each["code"] not in told:
            _log.warning("%s: %s; %s", upstream.label, each["what"], each["fix"])
