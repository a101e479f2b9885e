"""What an engine's own pages say about it: the records that discovery, the gateway and doctor share.

Promise: a fact is either read, given by the operator, or named as unknown with the option that gives
it; nothing is filled in by a guess. A reading that contradicts itself is marked doubtful, and a
doubtful reading never raises a capacity (`refreshed`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from kvgate.core.geometry import Serving
from kvgate.core.records import PoolFacts

# What a pool cannot be without.
NAMED = ("total_blocks", "block_size", "context")


@dataclass(frozen=True, slots=True)
class Page:
    """The answer of one endpoint. `status` 0: none came, and `text` says why."""

    status: int
    text: str = ""

    @property
    def is_ok(self) -> bool:
        return self.status == 200


Pages: TypeAlias = Mapping[str, Page]
"""By path, as asked for."""


class Level(enum.StrEnum):
    """How much a finding matters."""

    NOTE = "note"
    """Worth knowing; nothing to do."""
    WARNING = "warning"
    """Costs throughput, or hides something from the gate."""
    UNSAFE = "unsafe"
    """The cache can overflow although kvgate admits by the book."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was noticed. `code` is stable, for scripts; `fix` says what to do about it.

    `doubts`: the capacity read beside it must not be trusted to be higher than what was known.
    """

    code: str
    level: Level
    what: str
    fix: str = ""
    doubts: bool = False


@dataclass(frozen=True, slots=True)
class Given:
    """The operator's figures; each one beats what is read. None: read it.

    `model_config`: the model's config.json, for engines whose sequences take blocks from several
    groups; `serving`: options of that engine which no page tells (parallelism, token budget).
    """

    total_blocks: int | None = None
    block_size: int | None = None
    context: int | None = None
    max_seqs: int | None = None
    lookahead: int | None = None
    safety_fraction: float = 0.90
    model_config: Mapping[str, Any] | None = None
    serving: Serving | None = None

    @property
    def is_complete(self) -> bool:
        """Whether nothing of a pool has to be read."""
        return all(getattr(self, name) is not None for name in NAMED)


@dataclass(slots=True)
class Reading:
    """What the pages of one engine say, before the operator's figures.

    `is_exact`: the capacity is the engine's own count of one rank, to the block. `groups`: KV groups
    a sequence takes blocks from: "one", "several", or "unknown" (priced only with a model
    configuration). `lookahead`: tokens held beyond the answer. `whole_slots`: capacity is slots.
    `engine_context`: tokens beyond which the engine stores nothing, whatever the operator says.
    `sources`: where each fact was read.
    """

    engine: str
    total_blocks: int | None = None
    block_size: int | None = None
    context: int | None = None
    max_seqs: int | None = None
    lookahead: int = 0
    ranks: int = 1
    needs_margin: bool = False  # what is exact must not be filled to the last block
    is_exact: bool = False
    groups: str = "one"
    prefix_caching: bool = True
    state_mode: str | None = None
    match_unit: int | None = None
    retention_interval: int | None = 0
    engine_context: int | None = None
    kv_dtype: str = "auto"
    draft_tokens: int = 0
    blocks_of_longest: float | None = None
    whole_slots: bool = False
    models: tuple[str, ...] = ()
    version: str | None = None
    preemptions: int | None = None
    running: int | None = None
    waiting: int | None = None
    findings: list[Finding] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    why_unknown: dict[str, str] = field(default_factory=dict)

    def note(self, code: str, what: str, fix: str = "", level: Level = Level.NOTE) -> None:
        self.findings.append(Finding(code, level, what, fix))

    def warn(self, code: str, what: str, fix: str, *, doubts: bool = False) -> None:
        self.findings.append(Finding(code, Level.WARNING, what, fix, doubts))

    def unsafe(self, code: str, what: str, fix: str, *, doubts: bool = False) -> None:
        self.findings.append(Finding(code, Level.UNSAFE, what, fix, doubts))

    def read(self, name: str, value: int | None, source: str) -> None:
        """Take over a fact, where there is one."""
        if value is not None:
            setattr(self, name, value)
            self.sources[name] = source


@dataclass(frozen=True, slots=True)
class Found:
    """The facts of one engine rank, or what is missing for them.

    `facts`: None where something that is needed is unknown; then `missing` names it and `unknown`
    says why, and with which option to give it. `context`, `models`: known or not, also without
    `facts`. `ranks`: data-parallel ranks, each with such a pool. `is_exact`: capacity and price are
    the engine's own to the block. `preemptions`, `running`, `waiting`: at the moment of reading.
    `needs_key`: without `facts` because the engine refuses those who have no key of its own.
    """

    engine: str
    facts: PoolFacts | None = None
    models: tuple[str, ...] = ()
    context: int | None = None
    warnings: tuple[Finding, ...] = ()
    unknown: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    ranks: int = 1
    is_exact: bool = False
    is_up: bool = True
    version: str | None = None
    preemptions: int | None = None
    running: int | None = None
    waiting: int | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    needs_key: bool = False

    @property
    def is_doubtful(self) -> bool:
        """The reading contradicts itself, or was not whole."""
        return self.facts is None or any(finding.doubts for finding in self.warnings)


def refreshed(before: PoolFacts, found: Found) -> PoolFacts:
    """The facts to go on with after reading again: the new ones, but never more on a doubtful reading.

    The safety fraction stays, and the most that it may become: they belong to whoever corrects them.
    """
    new = found.facts
    if new is None:
        return before
    new = replace(new, safety_fraction=before.safety_fraction, most_fraction=before.most_fraction)
    if not found.is_doubtful:
        return new
    tokens = min(before.total_blocks * before.block_size, new.total_blocks * new.block_size)
    if tokens < new.block_size:
        return before
    ends = (before.engine_context, new.engine_context)
    seqs = [limit for limit in (before.max_seqs, new.max_seqs) if limit is not None]
    return replace(
        new,
        total_blocks=tokens // new.block_size,
        context=min(before.context, new.context),
        max_seqs=min(seqs, default=None),
        lookahead=max(before.lookahead, new.lookahead),
        engine_context=None if None in ends else max(end for end in ends if end is not None),
        geometry=new.geometry or before.geometry,
    )
