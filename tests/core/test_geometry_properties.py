"""Laws of the price on several groups, and the price against an allocator written here from scratch.

The allocator knows nothing of the formulas: it keeps a block table for each group, gives blocks at
each step, and frees what has left the window, as a KV manager does.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from model_facts import GEMMA4_26B, GPT_OSS_20B, LLAMA4, LLAMA_8B, MISTRAL_7B, NEMOTRON_NANO, QWEN35_27B, gqa

from kvgate.core.geometry import Group, Kind, KVLayout, Serving, layout_for
from kvgate.core.price import blocks_for, output_cap_that_fits
from kvgate.core.records import Ask, PoolFacts

CONTEXT = 600
# Small windows and chunks, so that short requests cross many of them.
SMALL = [
    LLAMA_8B,
    MISTRAL_7B | {"sliding_window": 40},
    gqa("gpt_oss", 24, 64, 8, 2880, 64, sliding_window=33),
    GEMMA4_26B | {"sliding_window": 50},
    gqa("llama4_text", 8, 40, 8, 5120, 128, attention_chunk_size=48),
    gqa("llama4_text", 8, 40, 8, 5120, 128, attention_chunk_size=50),
    NEMOTRON_NANO,
    # States so small that they do not stretch the blocks: one checkpoints within a prefill, one does not.
    NEMOTRON_NANO | {"mamba_num_heads": 2, "mamba_head_dim": 16, "ssm_state_size": 16},
    QWEN35_27B
    | dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), 2)
    | {"linear_value_head_dim": 16, "linear_key_head_dim": 16},
]

servings = st.builds(
    Serving,
    block_size=st.sampled_from([1, 4, 16, 32]),
    max_batched_tokens=st.sampled_from([8, 30, 64, 1000]),
    concurrent_batches=st.integers(1, 3),
    draft_tokens=st.sampled_from([0, 0, 0, 1, 3]),
    extra_lookahead=st.sampled_from([0, 1]),
    drafts_keep_kv=st.booleans(),
    prefix_caching=st.booleans(),
    hybrid_manager=st.sampled_from([True, True, True, False]),
)
configs = st.sampled_from(SMALL)


@dataclass
class Table:
    """One group's block table of one sequence: the numbers of the blocks that have memory."""

    group: Group
    held: set[int] = field(default_factory=set)
    taken: int = 0

    def grow(self, tokens: int) -> None:
        blocks = -(-tokens // self.group.block_size)
        self.held |= set(range(self.taken, blocks))
        self.taken = max(self.taken, blocks)

    def free(self, settled: int) -> None:
        """Give back blocks of which no token will be read again, `settled` tokens being computed."""
        window = self.group.window
        if self.group.kind is Kind.SLIDING:
            first = max(0, settled - window + 1)
        else:
            first = settled // window * window
        self.held -= {block for block in self.held if (block + 1) * self.group.block_size <= first}


@dataclass
class States:
    """One group's states of one sequence, by the number of the block at whose end each stands."""

    group: Group
    held: set[int] = field(default_factory=lambda: {0})

    def step(self, computed: int, tokens: int, settled: int, *, ends_prefill: bool) -> None:
        size = self.group.block_size
        self.held = {block for block in self.held if block >= (settled - 1) // size}
        last = -(-(computed + tokens) // size) - 1
        self.held.add(last)
        if ends_prefill and self.group.checkpoints and (last - 1) * size >= computed:
            self.held.add(last - 1)


class Sequence:
    """A sequence on the naive manager: every group has its own table."""

    def __init__(self, layout: KVLayout, serving: Serving, prompt: int, cap: int) -> None:
        self.serving, self.prompt, self.cap = serving, prompt, cap
        self.tables = [Table(group) for group in layout.groups if group.kind is not Kind.STATE]
        self.states = [States(group) for group in layout.groups if group.kind is Kind.STATE]
        self.flying: list[int] = []
        self.computed = 0

    def step(self, tokens: int) -> None:
        self.flying = (
            self.flying[len(self.flying) - self.serving.batches + 1 :] if self.serving.batches > 1 else []
        )
        settled = self.computed - sum(self.flying)
        for table in self.tables:
            if table.group.window:
                table.free(settled)
            table.grow(min(self.computed + tokens + self.serving.lookahead, CONTEXT))
        if self.serving.states == "align":
            ends = self.computed < self.prompt <= self.computed + tokens
            for states in self.states:
                states.step(self.computed, tokens, settled, ends_prefill=ends)
        self.flying.append(tokens)
        self.computed += tokens

    @property
    def held(self) -> int:
        states = sum(len(group.held) + self.serving.draft_tokens for group in self.states)
        return states + sum(len(table.held) for table in self.tables)

    @property
    def is_prefilling(self) -> bool:
        return self.computed < self.prompt

    @property
    def is_over(self) -> bool:
        return self.computed >= min(self.prompt + self.cap - 1, CONTEXT)

    def wants(self) -> int:
        """Tokens of a decode step: one and its drafts, not beyond the context."""
        return min(1 + self.serving.draft_tokens, CONTEXT - self.computed)


def peak_of(layout: KVLayout, serving: Serving, prompt: int, cap: int, draw: random.Random) -> int:
    one = Sequence(layout, serving, prompt, cap)
    peak = 0
    while one.is_prefilling:
        one.step(draw.randint(1, min(prompt - one.computed, serving.max_batched_tokens)))
        peak = max(peak, one.held)
    while not one.is_over:
        one.step(one.wants())
        peak = max(peak, one.held)
        if serving.batches == 1 and serving.draft_tokens:
            # Rejected drafts are computed again.
            one.computed -= draw.randint(0, one.flying[-1] - 1)
    return peak


@settings(max_examples=400, deadline=None)
@given(configs, servings, st.integers(1, 500), st.integers(1, 300), st.integers(0, 1 << 30))
def test_the_price_is_never_below_what_a_step_by_step_allocator_holds(
    config: dict[str, object], serving: Serving, prompt: int, cap: int, seed: int
) -> None:
    layout = layout_for(config, serving)
    peak = peak_of(layout, serving, prompt, min(cap, CONTEXT - prompt), random.Random(seed))
    assert layout.price(prompt, cap, CONTEXT) >= peak


@settings(max_examples=100, deadline=None)
@given(
    configs,
    servings,
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 40)), min_size=1, max_size=8),
    st.integers(0, 1 << 30),
)
def test_with_a_shared_transient_the_sum_of_prices_and_the_reserve_cover_all_requests(
    config: dict[str, object], serving: Serving, shapes: list[tuple[int, int]], seed: int
) -> None:
    draw = random.Random(seed)
    serving = replace(
        serving, draft_tokens=0, max_batched_tokens=max(serving.max_batched_tokens, len(shapes))
    )
    layout = layout_for(config, serving, shared_transient=True)
    running = [Sequence(layout, serving, prompt, cap) for prompt, cap in shapes]
    room = sum(layout.price(prompt, cap, CONTEXT) for prompt, cap in shapes) + layout.reserve_blocks
    while running:
        # Decodes come first in vLLM's budget only by order; here every running one gets a token.
        budget = draw.randint(len(running), serving.max_batched_tokens)
        for place, one in enumerate(running):
            spare = budget - (len(running) - place - 1)
            tokens = min(one.prompt - one.computed, spare) if one.is_prefilling else one.wants()
            one.step(tokens)
            budget -= tokens
            assert sum(other.held for other in running) <= room
        running = [one for one in running if not one.is_over]


@settings(max_examples=200, deadline=None)
@given(configs, servings, st.integers(1, 500), st.integers(1, 300), st.booleans())
def test_the_price_never_falls_with_a_longer_prompt_or_a_higher_cap(
    config: dict[str, object], serving: Serving, prompt: int, cap: int, shared: bool
) -> None:
    layout = layout_for(config, serving, shared)
    price = layout.price(prompt, cap, CONTEXT)
    assert price <= layout.price(prompt + 1, cap, CONTEXT)
    assert price <= layout.price(prompt, cap + 1, CONTEXT)
    assert 1 <= layout.blocks(prompt, cap, CONTEXT).final <= price


@settings(max_examples=100, deadline=None)
@given(configs, servings, st.integers(1, 500), st.integers(1, 300))
def test_without_the_hybrid_manager_the_price_is_that_of_one_group(
    config: dict[str, object], serving: Serving, prompt: int, cap: int
) -> None:
    plain = replace(serving, hybrid_manager=False, draft_tokens=0)
    layout = layout_for(config, plain)
    if any(group.kind is Kind.STATE for group in layout.groups):
        return
    facts = PoolFacts(10_000, layout.block_size, CONTEXT, lookahead=layout.lookahead)
    if len(layout.groups) == 1:
        assert layout.price(prompt, cap, CONTEXT) in (
            blocks_for(prompt, cap, facts),
            *(() if not layout.rolling else range(1, 1 + blocks_for(prompt, cap, facts))),
        )


@settings(max_examples=100, deadline=None)
@given(configs, servings, st.integers(1, 500), st.integers(1, 2000))
def test_the_largest_cap_that_fits_fits_and_one_more_does_not(
    config: dict[str, object], serving: Serving, prompt: int, free: int
) -> None:
    facts = PoolFacts(5000, 16, CONTEXT, geometry=layout_for(config, serving))
    cap = output_cap_that_fits(Ask((prompt,)), facts, free, None)
    if cap is None:
        assert blocks_for(prompt, 1, facts) > free
        return
    assert blocks_for(prompt, cap, facts) <= free
    assert cap == CONTEXT - prompt or blocks_for(prompt, cap + 1, facts) > free


def test_the_allocator_of_this_test_can_catch_a_price_that_is_too_low() -> None:
    serving = Serving(block_size=16, max_batched_tokens=64, concurrent_batches=2, prefix_caching=False)
    for config in (
        GPT_OSS_20B | {"sliding_window": 33},
        LLAMA4["text_config"] | {"attention_chunk_size": 48},
    ):
        layout = layout_for(config, serving)
        low = replace(layout, rolling=tuple(replace(one, prefill=one.decode) for one in layout.rolling))
        peaks = [peak_of(layout, serving, 400, 10, random.Random(seed)) for seed in range(50)]
        assert layout.price(400, 10, CONTEXT) >= max(peaks) > low.price(400, 10, CONTEXT)
