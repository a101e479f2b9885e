"""The KV groups of the model that an engine runs: its configuration, with the options that the engine shows.

Promise: what no page and no operator tells is taken at its worst, or asked for; a price that is below
the engine's own word is not used unless the operator has given every size.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from kvgate.core.geometry import Group, Kind, KVLayout, Serving, UnknownGeometry, from_config, layout_for
from kvgate.core.geometry.groups import form_groups
from kvgate.core.geometry.planned import planned_blocks
from kvgate.wire.engines.found import Given, Reading

# Requests for which the tighter of two safe layouts is chosen: a chat, in a context that holds it.
TYPICAL = (1000, 500)
# The engine's own figure for its longest request is rounded; a price lower by more is another model.
PRICE_SLACK = 0.02
# More blocks a request than without prefix caching, from which on it is said.
STATES_MATTER = 1.1
# Tokens in flight that are tried where they are not told: up to five steps of a usual budget.
IN_FLIGHT = sorted({steps * (256 << n) for steps in range(1, 6) for n in range(14)})
ANY = 1 << 40
# The engine's figure is a whole number of blocks, told as a quotient.
EXACT = 0.1
# From this version on vLLM's figure has the tokens of all steps in flight in it, not of one.
COUNTS_STEPS = (0, 32)
_UNEXPLAINED = (
    "no number of tokens in flight explains the {told:,.0f} blocks that the engine tells for its longest "
    "request with this model configuration"
)
_EXPLAINS = (
    "give the configuration of the model that runs there, the engine's tensor-parallel size "
    "(--tensor-parallel), and its token budget of a step (--max-batched-tokens)"
)


def layout_of(reading: Reading, given: Given) -> tuple[KVLayout | None, str | None]:
    """How sequences take blocks from several groups; or why that is not known."""
    config = given.model_config
    if reading.engine != "vllm":
        # The groups are vLLM's; the other engines here keep one length for all layers.
        return None, None
    if config is None:
        return None, _unpriced(reading, given)
    assert reading.block_size is not None
    assert reading.total_blocks is not None
    assert reading.context is not None
    try:
        geometry = from_config(config)
        serving = _serving(reading, given.serving or Serving())
        groups, _ = form_groups(geometry, serving)
        in_flight = _in_flight(groups, serving, reading)
        if in_flight is None:
            what = _UNEXPLAINED.format(told=reading.blocks_of_longest)
            if not given.is_complete:
                return None, f"{what}. {_EXPLAINS[0].upper()}{_EXPLAINS[1:]}"
            reading.unsafe("model_config_differs", what, _EXPLAINS)
            reading.is_exact, in_flight = False, ANY
        if serving.max_batched_tokens is None:
            serving = replace(serving, in_flight_tokens=in_flight)
        each = layout_for(geometry, serving)
        once = layout_for(geometry, serving, shared_transient=True)
    except UnknownGeometry as wrong:
        return None, f"the model configuration does not tell the price: {wrong}"
    why = _short_of(groups, serving, reading, given)
    if why is not None:
        return None, why
    if each.block_size != reading.block_size:
        reading.unsafe(
            "block_size_differs",
            f"the model configuration gives blocks of {each.block_size} tokens and the engine has "
            f"{reading.block_size}",
            "give the configuration of the model that runs there, and the engine's options",
        )
        reading.is_exact = False
    prompt = max(1, min(TYPICAL[0], reading.context - TYPICAL[1]))
    shape = (prompt, min(TYPICAL[1], reading.context))
    if geometry.count(Kind.STATE) and serving.states == "align":
        without = layout_for(geometry, replace(serving, prefix_caching=False, state_mode=None))
        _tell_states(each, without, shape, reading)
    if in_flight == ANY:
        return each, None
    return each.tighter(once, reading.total_blocks, shape, reading.context), None


def _in_flight(groups: Sequence[Group], serving: Serving, reading: Reading) -> int | None:
    """Tokens that may be in flight: by the operator's word, or by the engine's on its longest request.

    `ANY` where that does not depend on it, or is not to be had: then what is in flight is charged to each
    request, and is never more than its own length. None where no number explains it.
    """
    if serving.max_batched_tokens is not None:
        return serving.in_flight
    told, context = reading.blocks_of_longest, reading.engine_context
    if told is None or context is None or reading.ranks > 1 or _version(reading) < COUNTS_STEPS:
        return ANY
    if not any(group.kind in (Kind.SLIDING, Kind.CHUNKED) for group in groups):
        return ANY

    def explains(tokens: int) -> bool:
        drafted = {0, max(0, serving.draft_tokens - 1)}
        planned = [planned_blocks(groups, serving, tokens, context, kept) for kept in drafted]
        return any(blocks is None or abs(blocks - told) < EXACT for blocks in planned)

    if explains(ANY):
        return ANY
    return max(filter(explains, IN_FLIGHT), default=None)


def _version(reading: Reading) -> tuple[int, ...]:
    numbers = re.match(r"(\d+)\.(\d+)", reading.version or "")
    return tuple(map(int, numbers.groups())) if numbers else ()


def _short_of(groups: Sequence[Group], serving: Serving, reading: Reading, given: Given) -> str | None:
    """Why the price is not used, where it is below what the engine says of its longest request."""
    told, context = reading.blocks_of_longest, reading.engine_context
    if told is None or context is None:
        return None
    planned = planned_blocks(groups, serving, serving.in_flight, context, max(0, serving.draft_tokens - 1))
    if planned is None or planned >= told * (1 - PRICE_SLACK) - 1:
        return None
    what = (
        f"the longest request is priced at {planned:,} blocks, and by the engine's own word takes {told:,.0f}"
    )
    fix = (
        "give the configuration of the model that runs there, with the engine's tensor and pipeline parallel "
        "sizes and its token budget of a step"
    )
    # Of unequal ranks the engine's own word is only about right.
    if not given.is_complete and reading.ranks == 1:
        return f"{what}: {fix}; or every size, with --total-blocks, --block-size and --context"
    reading.unsafe("price_below_engine", what, fix)
    reading.is_exact = False
    return None


def _tell_states(caching: KVLayout, without: KVLayout, shape: tuple[int, int], reading: Reading) -> None:
    """What the states that prefix caching keeps come to, where it is worth a thought."""
    kept, alone = (layout.price(*shape, reading.context) for layout in (caching, without))
    if kept >= STATES_MATTER * alone:
        reading.note(
            "states_kept",
            f"with prefix caching a request of {shape[0]:,} + {shape[1]:,} tokens takes {kept} blocks, "
            f"without it {alone}: states at block borders are kept beside the running one",
            "where prompts share little, start vLLM with --no-enable-prefix-caching",
        )


def _unpriced(reading: Reading, given: Given) -> str | None:
    """Why a model without a configuration cannot be priced; None where it has one group, or where the
    operator has given every size, and the danger is named."""
    if reading.groups == "one":
        return None
    why = (
        "the model has several KV groups (sliding window, state or chunked layers) that no page tells"
        if reading.groups == "several"
        else "no page tells whether the model has one KV group or several"
    )
    if not given.is_complete:
        return f"{why}. Give the model's config.json with --model-config FILE"
    reading.unsafe(
        "hybrid_unpriced", f"{why}: every request is priced as if it had one", "give --model-config FILE"
    )
    reading.is_exact = False
    return None


def _serving(reading: Reading, given: Serving) -> Serving:
    """The engine's options: those that it shows, and those that only the operator can tell."""
    drafts = given.draft_tokens or reading.draft_tokens
    assert reading.block_size is not None
    return replace(
        given,
        block_size=reading.block_size,
        prefix_caching=reading.prefix_caching,
        state_mode=reading.state_mode,
        match_unit=reading.match_unit,
        retention_interval=reading.retention_interval,
        draft_tokens=drafts,
        # Some drafters write one slot more, and no page tells which one drafts.
        extra_lookahead=given.extra_lookahead if given.draft_tokens or not drafts else 1,
        kv_dtype=given.kv_dtype if given.kv_dtype != "auto" else reading.kv_dtype,
        # The engine's own word that all layers keep every token.
        hybrid_manager=given.hybrid_manager and reading.groups != "one",
    )
