"""What a request costs: known figures, the caps, and the laws of the formula."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.price import (
    blocks_for,
    effective_output_cap,
    kv_bytes_per_token,
    output_cap_that_fits,
    price,
    requested_cap,
    worst_case_blocks,
)
from kvgate.core.records import Ask, CapRules, Misuse, PoolFacts, Price, Reason

POOL = PoolFacts(total_blocks=1000, block_size=16, context=2048, safety_fraction=1.0)


def pool(
    total: int = 1000,
    block_size: int = 16,
    context: int = 2048,
    seqs: int | None = None,
    lookahead: int = 0,
    engine_context: int | None = None,
) -> PoolFacts:
    return PoolFacts(
        total,
        block_size,
        context,
        seqs,
        safety_fraction=1.0,
        lookahead=lookahead,
        engine_context=engine_context,
    )


pools = st.builds(
    pool,
    total=st.integers(1, 500),
    block_size=st.sampled_from([1, 2, 3, 16, 128]),
    context=st.integers(1, 600),
    seqs=st.none() | st.integers(1, 8),
    lookahead=st.integers(0, 5),
)
caps = st.none() | st.integers(1, 700)
asks = st.builds(
    Ask,
    prompts=st.lists(st.integers(0, 620), min_size=1, max_size=3).map(tuple),
    output_cap=caps,
    choices=st.integers(1, 3),
    rules=st.builds(CapRules, default=caps, ceiling=caps),
)


# Blocks that vLLM was seen to hold at the end of an answer (block size 16).
@pytest.mark.parametrize(("prompt", "cap", "blocks"), [(16, 17, 2), (16, 18, 3), (100, 29, 8), (100, 30, 9)])
def test_blocks_are_those_measured_on_vllm(prompt: int, cap: int, blocks: int) -> None:
    assert blocks_for(prompt, cap, POOL) == blocks
    assert price(Ask((prompt,), cap), POOL) == Price(blocks, 1, cap)


@pytest.mark.parametrize(
    ("prompt", "cap", "block_size", "lookahead", "blocks"),
    [
        (1, 1, 16, 0, 1),
        (0, 1, 16, 0, 1),
        (200, 1000, 128, 0, 10),
        (71, 600, 1, 0, 670),
        (16, 17, 16, 1, 3),
        (16, 1, 16, 0, 1),
        (17, 1, 16, 0, 2),
    ],
)
def test_the_last_token_is_not_stored_and_lookahead_is(
    prompt: int, cap: int, block_size: int, lookahead: int, blocks: int
) -> None:
    assert blocks_for(prompt, cap, pool(block_size=block_size, lookahead=lookahead)) == blocks


def test_nothing_is_stored_beyond_the_context() -> None:
    assert blocks_for(100, 28, pool(context=128, lookahead=50, engine_context=128)) == 8


def test_beyond_a_context_that_is_not_the_engines_own_it_stores_what_it_looks_ahead() -> None:
    assert blocks_for(100, 28, pool(context=128, lookahead=50, engine_context=4096)) == 12
    assert blocks_for(100, 28, pool(context=128, lookahead=50)) == 12


def test_llama_3_1_8b_takes_128_kib_for_a_token() -> None:
    assert kv_bytes_per_token(32, 8, 128) == 131072


def test_smaller_elements_take_fewer_bytes() -> None:
    assert kv_bytes_per_token(32, 8, 128, 1) == 65536
    assert kv_bytes_per_token(32, 8, 128, 0.5) == 32768


@pytest.mark.parametrize("sizes", [(0, 8, 128, 2), (32, -1, 128, 2), (32, 8, 0, 2), (32, 8, 128, 0)])
def test_a_model_without_size_is_misuse(sizes: tuple[int, int, int, float]) -> None:
    with pytest.raises(Misuse, match="must be above 0"):
        kv_bytes_per_token(*sizes)


@pytest.mark.parametrize(
    ("requested", "prompt", "context", "cap"),
    [
        (None, 100, 128, 28),
        (10, 100, 128, 10),
        (28, 100, 128, 28),
        (29, 100, 128, 28),
        (10**9, 100, 128, 28),
        (None, 127, 128, 1),
        (None, 128, 128, None),
        (1, 128, 128, None),
        (1, 500, 128, None),
        (None, 0, 128, 128),
    ],
)
def test_the_cap_is_clamped_to_the_rest_of_the_context(
    requested: int | None, prompt: int, context: int, cap: int | None
) -> None:
    assert effective_output_cap(requested, prompt, context) == cap


@pytest.mark.parametrize(("requested", "prompt"), [(0, 1), (-1, 1), (1, -1)])
def test_a_cap_below_one_and_a_negative_prompt_are_misuse(requested: int, prompt: int) -> None:
    with pytest.raises(Misuse):
        effective_output_cap(requested, prompt, 128)


def test_an_unset_cap_is_the_rest_of_the_context() -> None:
    assert price(Ask((48,)), POOL) == Price(128, 1, 2000)


@pytest.mark.parametrize("prompt", [2048, 2049, 10**9])
def test_a_prompt_that_fills_the_context_is_refused_and_not_truncated(prompt: int) -> None:
    assert price(Ask((prompt,), 1), POOL) is Reason.CONTEXT_LENGTH_EXCEEDED


def test_one_prompt_of_a_list_that_fills_the_context_refuses_the_list() -> None:
    assert price(Ask((5, 2048), 1), POOL) is Reason.CONTEXT_LENGTH_EXCEEDED


def test_what_can_never_fit_the_pool_is_told_apart() -> None:
    small = pool(total=10)
    assert price(Ask((100,), 61), small) == Price(10, 1, 61)
    assert price(Ask((100,), 62), small) is Reason.KV_CAPACITY_EXCEEDED
    assert price(Ask((100,)), small) is Reason.KV_CAPACITY_EXCEEDED


def test_the_safety_fraction_counts_for_never() -> None:
    margin = PoolFacts(total_blocks=10, block_size=16, context=2048, safety_fraction=0.9)
    assert price(Ask((1,), 9 * 16), margin) == Price(9, 1, 144)
    assert price(Ask((1,), 9 * 16 + 1), margin) is Reason.KV_CAPACITY_EXCEEDED


def test_more_sequences_than_the_engine_has_slots_can_never_fit() -> None:
    slots = pool(seqs=2)
    assert isinstance(price(Ask((1,), 1, choices=2), slots), Price)
    assert price(Ask((1,), 1, choices=3), slots) is Reason.KV_CAPACITY_EXCEEDED
    assert price(Ask((1, 1, 1), 1), slots) is Reason.KV_CAPACITY_EXCEEDED


def test_every_choice_and_every_prompt_is_a_sequence_rounded_on_its_own() -> None:
    assert price(Ask((100,), 30, choices=4), POOL) == Price(36, 4, 30)
    assert price(Ask((16, 100), 17), POOL) == Price(2 + 8, 2, 17)
    assert price(Ask((16, 100), 17, choices=3), POOL) == Price(30, 6, 17)


def test_a_prompt_list_is_sent_one_cap_and_each_prompt_is_bounded_by_the_context() -> None:
    assert price(Ask((100, 2000)), POOL) == Price(128 + 128, 2, 1948)


@pytest.mark.parametrize(
    ("asked", "default", "ceiling", "cap"),
    [
        (None, None, None, None),
        (None, 16, None, 16),
        (500, 16, None, 500),
        (500, None, 100, 100),
        (50, None, 100, 50),
        (None, None, 100, 100),
        (None, 16, 100, 16),
        (None, 200, 100, 100),
    ],
)
def test_the_default_is_for_unset_caps_and_the_ceiling_is_for_all(
    asked: int | None, default: int | None, ceiling: int | None, cap: int | None
) -> None:
    rules = CapRules(default, ceiling)
    assert requested_cap(asked, rules) == cap
    priced = price(Ask((48,), asked, rules=rules), POOL)
    assert isinstance(priced, Price)
    assert priced.output_cap == (cap or 2000)


@pytest.mark.parametrize("ask", [Ask(()), Ask((1,), choices=0)])
def test_a_request_without_a_sequence_is_misuse(ask: Ask) -> None:
    with pytest.raises(Misuse):
        price(ask, POOL)


@given(asks, pools)
def test_a_price_is_within_the_pool_and_its_cap_within_the_context(ask: Ask, facts: PoolFacts) -> None:
    priced = price(ask, facts)
    assert (priced is Reason.CONTEXT_LENGTH_EXCEEDED) == (max(ask.prompts) >= facts.context)
    if isinstance(priced, Price):
        assert 1 <= priced.blocks <= facts.usable_blocks
        assert priced.sequences == ask.choices * len(ask.prompts)
        assert 1 <= priced.output_cap <= facts.context - min(ask.prompts)
        assert (priced.blocks, priced.output_cap) == worst_case_blocks(ask, facts)


@given(st.data(), pools, caps, st.integers(1, 3))
def test_the_price_covers_every_token_that_is_stored_at_any_time(
    data: st.DataObject, facts: PoolFacts, cap: int | None, choices: int
) -> None:
    prompts = data.draw(st.lists(st.integers(0, facts.context - 1), min_size=1, max_size=3))
    priced = price(Ask(tuple(prompts), cap, choices), replace(facts, total_blocks=10**6, max_seqs=None))
    assert isinstance(priced, Price)
    held = 0
    for prompt in prompts:
        answer = min(priced.output_cap, facts.context - prompt)
        stored = max(min(prompt + made + facts.lookahead, facts.context) for made in range(answer))
        held += choices * len(range(0, stored, facts.block_size))
    assert held <= priced.blocks


@given(asks, pools, st.integers(0, 500), st.none() | st.integers(0, 8))
def test_the_cap_that_fits_is_the_largest_one(
    ask: Ask, facts: PoolFacts, free: int, free_seqs: int | None
) -> None:
    fits = output_cap_that_fits(ask, facts, free, free_seqs)

    def would_fit(cap: int) -> bool:
        asked = Ask(ask.prompts, cap, ask.choices, ask.rules)
        seqs_fit = free_seqs is None or ask.choices * len(ask.prompts) <= free_seqs
        in_context = max(ask.prompts) < facts.context
        return in_context and seqs_fit and worst_case_blocks(asked, facts)[0] <= free

    if fits is None:
        assert not would_fit(1)
        return
    assert would_fit(fits)
    most = facts.context - min(ask.prompts)
    ceiling = most if ask.rules.ceiling is None else min(most, ask.rules.ceiling)
    assert 1 <= fits <= ceiling
    assert fits == ceiling or not would_fit(fits + 1)


@given(st.integers(1, 10_000), st.integers(1, 100))
def test_usable_is_the_exact_floor_of_the_fraction(total: int, percent: int) -> None:
    facts = PoolFacts(total, 1, 1, safety_fraction=percent / 100)
    assert facts.usable_blocks == total * percent // 100


@pytest.mark.parametrize(
    "bad",
    [
        {"total_blocks": 0},
        {"block_size": 0},
        {"context": 0},
        {"max_seqs": 0},
        {"safety_fraction": 0.0},
        {"safety_fraction": 1.01},
        {"lookahead": -1},
    ],
)
def test_a_pool_that_cannot_be_is_misuse(bad: dict[str, float]) -> None:
    with pytest.raises(Misuse):
        PoolFacts(**{"total_blocks": 1, "block_size": 1, "context": 1, **bad})  # type: ignore[arg-type]  # wrong on purpose
