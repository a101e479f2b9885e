"""Blocks that one sequence can come to hold on a pool with several groups.

Promise: the price is never below what vLLM's KV manager allocates at any step, whatever the chunks
in which the prompt is computed and however many steps are in flight. Two moments decide: the end of
the prefill, when windows still hold the tokens in flight, and the end of the answer, when whole
layers are longest. Everything that does not depend on the request is worked out once.

With `shared_transient` the tokens in flight are not charged to each request: the engine cannot have
more in flight than its token budget, so `reserve_blocks` are taken off the pool once for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvgate.core.geometry.config import from_config
from kvgate.core.geometry.fields import unknown
from kvgate.core.geometry.groups import Group, form_groups
from kvgate.core.geometry.layers import Kind, ModelGeometry
from kvgate.core.geometry.serving import Serving


@dataclass(frozen=True, slots=True)
class Blocks:
    """What a sequence holds: the most at any step, and at the end of a full-length answer."""

    peak: int
    final: int


@dataclass(frozen=True, slots=True)
class Rolling:
    """`count` equal groups that free blocks behind them: most blocks in prefill and in decode."""

    count: int
    block_size: int
    prefill: int
    decode: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """A pool's groups, ready to price. Made by `layout_for`; hashable, compared by value.

    `whole`: (count, block size) of groups that keep every token; `rolling`: groups with a window or
    a chunk, and states at block borders; `fixed`: blocks that every sequence takes (cross attention, one
    state, states of drafts). `bytes_per_block`: on the fullest GPU.
    """

    groups: tuple[Group, ...]
    bytes_per_block: int
    block_size: int
    whole: tuple[tuple[int, int], ...]
    rolling: tuple[Rolling, ...]
    fixed: int
    lookahead: int
    drafts_in_flight: int
    prefill_in_flight: int
    reserve_blocks: int = 0
    shared_transient: bool = False

    def price(self, prompt_tokens: int, output_cap: int, context: int | None) -> int:
        """Most blocks that a sequence of this prompt and cap can hold at any step. `context`: tokens that
        a sequence may reach on this engine (None: not known)."""
        end = self._end(prompt_tokens, output_cap, context)
        if self.shared_transient or not self.rolling:
            return self._decode(end)
        return max(self._prefill(prompt_tokens, end), self._decode(end))

    def blocks(self, prompt_tokens: int, output_cap: int, context: int | None) -> Blocks:
        """Peak and final blocks."""
        final = self._decode(self._end(prompt_tokens, output_cap, context))
        return Blocks(self.price(prompt_tokens, output_cap, context), final)

    def tighter(self, other: KVLayout, total_blocks: int, shape: tuple[int, int], context: int) -> KVLayout:
        """This layout or the other: the one that admits more requests of (prompt, cap); this in a tie."""
        mine, others = (
            (total_blocks - layout.reserve_blocks) // layout.price(*shape, context)
            for layout in (self, other)
        )
        return other if others > mine else self

    def _end(self, prompt_tokens: int, output_cap: int, context: int | None) -> int:
        end = prompt_tokens + output_cap - 1 + self.lookahead + self.drafts_in_flight
        return max(1, end if context is None else min(end, context))

    def _decode(self, end: int) -> int:
        total = self.fixed
        for count, size in self.whole:
            total += count * -(-end // size)
        for group in self.rolling:
            total += group.count * min(-(-end // group.block_size), group.decode)
        return total

    def _prefill(self, prompt_tokens: int, end: int) -> int:
        end = min(end, prompt_tokens + self.prefill_in_flight)
        total = self._decode(end)
        for group in self.rolling:
            held = -(-end // group.block_size)
            total += group.count * (min(held, group.prefill) - min(held, group.decode))
        return total


def _most(group: Group, in_flight: int) -> int:
    """Most blocks that a window or a chunk holds while `in_flight` tokens are not settled."""
    size = group.block_size
    if group.kind is Kind.CHUNKED:
        # Freed up to the start of the chunk; a block on the border of two chunks stays.
        border = 1 if group.window % size else 0
        return -(-(group.window - 1 + in_flight) // size) + border
    # The window need not start where a block does, hence one more.
    return -(-(group.window - 1 + in_flight - 1) // size) + 1


def _states(group: Group, serving: Serving, steps: int) -> Rolling:
    """States at the borders of blocks: the settled one, one of each step in flight, and what prefills write
    beside them. `steps`: tokens of a decoding sequence in flight."""
    chunks = 1 if serving.retention_interval == 0 else serving.batches
    prefill = 1 + serving.batches + chunks * group.checkpoints
    # Any two that are held have a block's tokens between them, all of them in flight.
    return Rolling(1, group.block_size, prefill, min(prefill, 1 + -(-steps // group.block_size)))


def layout_for(
    model: ModelGeometry | Mapping[str, Any], serving: Serving | None = None, shared_transient: bool = False
) -> KVLayout:
    """The layout of a model on an engine. Raises `UnknownGeometry` where a fact is missing."""
    geometry = model if isinstance(model, ModelGeometry) else from_config(model)
    serving = serving or Serving()
    groups, bytes_per_block = form_groups(geometry, serving)
    drafts, batches = serving.draft_tokens, serving.batches
    # A request decodes its token and its drafts in each of the steps in flight.
    steps = batches * (1 + drafts) + serving.lookahead
    in_flight = serving.in_flight + serving.lookahead
    # With several drafting modules, the last tokens may be computed again and are kept longer.
    retained = max(0, drafts - 1)
    whole: Counter[int] = Counter()
    rolling: Counter[Rolling] = Counter()
    fixed = reserve = 0
    has_states = any(group.kind is Kind.STATE for group in groups)
    for group in groups:
        size = group.block_size
        if group.kind in (Kind.FULL, Kind.MLA):
            whole[size] += 1
            fixed += serving.copies(size) if has_states else 0
        elif group.kind is Kind.STATE:
            fixed += drafts
            if serving.states == "none":
                fixed += 1
            elif serving.states == "all":
                whole[size] += 1
            else:
                fixed += serving.copies(size)
                states = _states(group, serving, steps)
                rolling[states] += 1
                reserve += serving.not_given_back // size if states.prefill > states.decode else 0
        elif group.kind is Kind.CROSS:
            fixed += -(-_encoder_tokens(geometry, serving) // size)
        else:
            local = replace(group, window=group.window + (retained if group.kind is Kind.SLIDING else 0))
            # Shared: a request keeps its window, and what its part in flight does not fill of a block.
            kept = max(steps, size - 1 + serving.lookahead) if shared_transient else steps
            rolling[Rolling(1, size, _most(local, in_flight), _most(local, kept))] += 1
            reserve += serving.not_given_back // size
    return KVLayout(
        groups=groups,
        bytes_per_block=bytes_per_block,
        block_size=min(group.block_size for group in groups),
        whole=tuple((count, size) for size, count in sorted(whole.items())),
        rolling=tuple(replace(group, count=count) for group, count in rolling.items()),
        fixed=fixed,
        lookahead=serving.lookahead,
        drafts_in_flight=batches * drafts,
        prefill_in_flight=(batches - 1) * (1 + drafts) + serving.lookahead + drafts,
        reserve_blocks=reserve if shared_transient else 0,
        shared_transient=shared_transient,
    )


def _encoder_tokens(geometry: ModelGeometry, serving: Serving) -> int:
    tokens = serving.encoder_tokens if serving.encoder_tokens is not None else geometry.encoder_tokens
    if tokens is None:
        raise unknown(
            f"{geometry.model_type} has cross attention, and how many encoder tokens a request brings is not "
            "in its configuration (kvgate plan --encoder-tokens)"
        )
    return tokens
