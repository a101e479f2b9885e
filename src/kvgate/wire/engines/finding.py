"""Texts of an engine's endpoints -> `Found`: its facts, and what is unknown.

Promise: pure, and total: whatever the pages hold, the answer is a `Found`. The operator's figures
beat what is read, and what they contradict is said.
"""

from __future__ import annotations

from dataclasses import replace

from kvgate.core.geometry.layout import KVLayout
from kvgate.core.price import blocks_for
from kvgate.core.records import Misuse, PoolFacts
from kvgate.wire.engines import read_llamacpp
from kvgate.wire.engines.found import NAMED, Found, Given, Pages, Reading
from kvgate.wire.engines.grouping import layout_of
from kvgate.wire.engines.readers import READERS


def found_in(engine: str, pages: Pages, given: Given | None = None) -> Found:
    """What the pages of `engine` say, completed and overruled by what the operator gives."""
    given = given or Given()
    reading = READERS[engine].read(pages)
    _overrule(reading, given)
    missing = [name for name in NAMED if getattr(reading, name) is None]
    unknown = [
        f"{name}: {reading.why_unknown.get(name, 'no page tells it')}. Give it with "
        f"--{name.replace('_', '-')} N"
        for name in missing
    ]
    layout = None
    if not missing:
        layout, why = layout_of(reading, given)
        if why is not None:
            missing, unknown = ["model_config"], [f"model_config: {why}"]
    facts = None
    if not missing:
        try:
            facts = _within_pool(reading, given, _facts(reading, given, layout))
        except Misuse as wrong:
            missing, unknown = ["total_blocks"], [f"total_blocks: {wrong}"]
    if facts is not None and facts.usable_blocks < 1:
        missing = ["total_blocks"]
        unknown = [
            f"total_blocks: {facts.total_blocks} blocks leave none to reserve. Give more with "
            "--total-blocks, or a higher --safety-fraction"
        ]
        facts = None
    if facts is not None:
        _judge(reading, facts)
    return Found(
        engine=engine,
        facts=facts,
        models=reading.models,
        context=reading.context,
        warnings=tuple(reading.findings),
        unknown=tuple(unknown),
        missing=tuple(missing),
        ranks=reading.ranks,
        is_exact=reading.is_exact and facts is not None and not reading.needs_margin,
        version=reading.version,
        preemptions=reading.preemptions,
        running=reading.running,
        waiting=reading.waiting,
        sources=dict(reading.sources),
    )


def _overrule(reading: Reading, given: Given) -> None:
    """The operator's figures replace the engine's; a larger pool or context than it has is unsafe."""
    sure = reading.engine in ("vllm", "sglang") and reading.is_exact
    for name in (*NAMED, "max_seqs", "lookahead"):
        value, read = getattr(given, name), getattr(reading, name)
        if value is None:
            continue
        is_more = read is not None and value > read
        if name == "total_blocks" and sure and is_more and given.block_size in (None, reading.block_size):
            reading.unsafe(
                "capacity_above_engine",
                f"--total-blocks {value:,} is more than the {read:,} that the engine has",
                f"leave it out, or set it to at most {read}",
            )
        elif name == "context" and is_more:
            reading.warn(
                "context_above_engine",
                f"--context {value:,} is more than the {read:,} that the engine tells",
                f"leave it out, or set it to at most {read}",
            )
        elif name in ("block_size", "lookahead") and read is not None and value < read and sure:
            reading.unsafe(
                f"{name}_below_engine",
                f"--{name.replace('_', '-')} {value} is less than the engine's {read}",
                "leave it out",
            )
        if name == "total_blocks":
            # What is left of the doubt about a bound is gone; what the engine counts stays exact.
            reading.findings = [f for f in reading.findings if f.code != "unified_or_split"]
            reading.is_exact = reading.is_exact and value == read
        if name == "max_seqs":
            reading.findings = [f for f in reading.findings if f.code != "slots_assumed"]
        setattr(reading, name, value)
        reading.sources[name] = "given"
    if given.block_size is not None and reading.engine == "tgi":
        reading.findings = [f for f in reading.findings if f.code != "block_size_assumed"]
    if reading.whole_slots and reading.context is not None:
        # One block is one slot with its whole context.
        slots = reading.max_seqs or 1
        reading.total_blocks, reading.block_size, reading.max_seqs = slots, reading.context, slots
        reading.sources |= {"total_blocks": "slots", "block_size": "a slot's context"}
        reading.is_exact = given.max_seqs is not None


def _facts(reading: Reading, given: Given, layout: KVLayout | None) -> PoolFacts:
    assert reading.total_blocks is not None
    assert reading.block_size is not None
    assert reading.context is not None
    drafts_known = layout is not None and given.lookahead is None
    return PoolFacts(
        total_blocks=reading.total_blocks,
        block_size=reading.block_size,
        context=reading.context,
        max_seqs=reading.max_seqs,
        # A slot is there or it is not: a share of it is of use to nobody.
        safety_fraction=1.0 if reading.whole_slots else given.safety_fraction,
        lookahead=0 if drafts_known else reading.lookahead,
        engine=reading.engine,
        geometry=layout,
        engine_context=reading.context if reading.whole_slots else reading.engine_context,
    )


def _within_pool(reading: Reading, given: Given, facts: PoolFacts) -> PoolFacts:
    """No longer a context than can be reserved: one request with no cap must be able to get in."""
    if facts.usable_blocks < 1 or blocks_for(1, facts.context, facts) <= facts.usable_blocks:
        return facts
    low, high = 1, facts.context
    while low < high:
        middle = (low + high + 1) // 2
        fits = blocks_for(1, middle, replace(facts, context=middle)) <= facts.usable_blocks
        low, high = (middle, high) if fits else (low, middle - 1)
    if given.context is not None:
        reading.warn(
            "context_above_pool",
            f"a request may ask for {facts.context:,} tokens and {low:,} can be reserved: one with no cap "
            "can never be admitted",
            f"set --default-output-cap and --max-output-cap below {low:,}, or --context {low}",
        )
        return facts
    reading.note(
        "context_lowered",
        f"a request may have {low:,} tokens instead of the {facts.context:,} of the engine: more can never "
        "be reserved",
        "a larger pool, or a higher --safety-fraction",
    )
    reading.context = low
    return replace(facts, context=low)


def _judge(reading: Reading, facts: PoolFacts) -> None:
    """What can be said of the pool as a whole."""
    if reading.ranks > 1:
        reading.warn(
            "several_ranks",
            f"{reading.ranks} data-parallel ranks with a pool each; where kvgate does not choose the rank of "
            "a request, it can count on the pool of one rank only",
            "let kvgate pin the rank by header (docs/engines.md), or one engine address a rank",
        )
    if reading.engine == "llamacpp" and reading.sources.get("total_blocks") == "given":
        read_llamacpp.judge(reading, facts.total_blocks)
    if reading.prefix_caching and reading.engine in ("vllm", "sglang"):
        reading.note(
            "prefix_caching",
            "prefixes that requests share are stored once and charged to each: safe, and wasteful where "
            "prompts share much",
        )
    if reading.preemptions:
        reading.warn(
            "preempted",
            f"{reading.preemptions:,} preemptions or retractions since the engine started: its cache has "
            "overflowed",
            "send everything through kvgate; if it all came through kvgate, lower --safety-fraction",
        )
