"""What a sequence costs on a pool of several groups: the measured examples and the named traps.

V traps are counts that come out too low (the engine preempts), W traps too high (room is wasted).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from model_facts import (
    DEEPSEEK_V3,
    FACTS,
    GEMMA3_27B,
    GEMMA4_26B,
    GPT_OSS_20B,
    LLAMA4,
    LLAMA_8B,
    MISTRAL_7B,
    NEMOTRON_NANO,
    QWEN35_27B,
)

from kvgate.core.geometry import Kind, KVLayout, Serving, UnknownGeometry, from_config, layout_for
from kvgate.core.geometry.groups import stage_ends
from kvgate.core.price import blocks_for, output_cap_that_fits, price, worst_case_blocks
from kvgate.core.records import Ask, Misuse, PoolFacts, Price, Reason

CONTEXT = 131072
# One step in flight and no prefix caching: as the examples below were measured.
PLAIN = Serving(concurrent_batches=1, prefix_caching=False)
GIB = 1 << 30


def pool(layout: KVLayout | None, total: int = 26214, context: int = CONTEXT) -> PoolFacts:
    return PoolFacts(total, 16, context, safety_fraction=1.0, geometry=layout)


@pytest.mark.parametrize(
    ("config", "budget", "block", "prompt", "cap", "peak", "final", "bytes_per_block"),
    [
        (LLAMA_8B, 8192, 16, 100, 30, 9, 9, 2_097_152),
        (GPT_OSS_20B, 8192, 16, 4000, 1000, 500, 322, 393_216),
        (GPT_OSS_20B, 8192, 16, 100, 50, 19, 19, 393_216),
        (GEMMA4_26B, 8192, 16, 4000, 2000, 1375, 513, 655_360),
        (GEMMA4_26B, 8192, 16, 100, 50, 55, 55, 655_360),
        (GEMMA3_27B, 8192, 16, 4000, 2000, 1750, 765, 1_310_720),
        (DEEPSEEK_V3, 8192, 64, 1000, 100, 18, 18, 4_497_408),
    ],
)
def test_blocks_are_those_measured_on_vllm(
    config: dict[str, object],
    budget: int,
    block: int,
    prompt: int,
    cap: int,
    peak: int,
    final: int,
    bytes_per_block: int,
) -> None:
    layout = layout_for(config, replace(PLAIN, max_batched_tokens=budget, block_size=block))
    measured = layout.blocks(prompt, cap, CONTEXT)
    assert measured.peak == peak
    # A window of 1,024 need not start where a block does: vLLM's own bound has the same block more.
    assert final <= measured.final <= final + sum(group.count for group in layout.rolling)
    assert layout.bytes_per_block == bytes_per_block


@pytest.mark.parametrize(
    ("config", "budget", "prompt", "cap", "measured"),
    [(GPT_OSS_20B, 2048, 4000, 1000, 380), (LLAMA4, 8192, 10000, 500, 2048)],
)
def test_v4_a_prefill_in_chunks_is_priced_for_the_worst_chunks(
    config: dict[str, object], budget: int, prompt: int, cap: int, measured: int
) -> None:
    """Alone, a request fills each step; beside others its chunks end anywhere, and it may hold more."""
    layout = layout_for(config, replace(PLAIN, max_batched_tokens=budget))
    assert measured <= layout.price(prompt, cap, CONTEXT) <= 1.25 * measured


def test_v3_a_token_ledger_would_admit_seven_times_too_many_on_gemma_4() -> None:
    layout = layout_for(GEMMA4_26B, PLAIN)
    by_label = 149 * 26214 / 503911
    assert layout.price(100, 50, 262144) == 55
    assert 55 / by_label == pytest.approx(7.1, abs=0.05)


def test_v4_prefill_holds_the_tokens_in_flight_of_every_window() -> None:
    layout = layout_for(GEMMA4_26B, PLAIN)
    assert layout.price(4000, 1, CONTEXT) == 125 + 5 * 250
    assert layout.price(4000, 1, CONTEXT) > 2.7 * (layout.blocks(4000, 1, CONTEXT).final - 65)


def test_v5_rounding_is_per_group() -> None:
    layout = layout_for(GPT_OSS_20B, PLAIN)
    assert layout.price(1, 1, CONTEXT) == 2
    assert layout.price(16, 2, CONTEXT) == 4  # 17 tokens: two blocks in each of two groups


def test_v6_one_kv_head_and_mla_take_as_many_bytes_on_each_gpu() -> None:
    assert layout_for(DEEPSEEK_V3, Serving(tp=8)).bytes_per_block == layout_for(DEEPSEEK_V3).bytes_per_block
    eight, sixteen = (layout_for(LLAMA_8B, Serving(tp=tp)).bytes_per_block for tp in (8, 16))
    assert layout_for(LLAMA_8B).bytes_per_block == 8 * eight == 8 * sixteen


def test_v7_drafts_in_flight_and_the_drafters_lookahead_are_held() -> None:
    drafting = layout_for(LLAMA_8B, Serving(draft_tokens=4, concurrent_batches=2))
    assert drafting.price(100, 30, CONTEXT) == -(-(129 + 4 + 2 * 4) // 16)
    ngram = layout_for(LLAMA_8B, Serving(draft_tokens=4, drafts_keep_kv=False, concurrent_batches=1))
    assert ngram.price(100, 30, CONTEXT) == -(-(129 + 4) // 16)
    flash = layout_for(LLAMA_8B, Serving(draft_tokens=4, extra_lookahead=1))
    assert flash.lookahead == 5


def test_v7_the_models_own_draft_layers_make_blocks_larger() -> None:
    plain = layout_for(DEEPSEEK_V3).bytes_per_block
    drafting = layout_for(DEEPSEEK_V3, Serving(draft_tokens=1, model_drafter=True)).bytes_per_block
    assert drafting == plain // 61 * 62


def test_v8_every_sequence_of_a_request_is_priced_on_its_own() -> None:
    facts = pool(layout_for(GPT_OSS_20B, PLAIN))
    one = blocks_for(100, 50, facts)
    assert price(Ask((100, 100), 50, choices=3), facts) == Price(6 * one, 6, 50)


def test_v9_an_unset_cap_is_the_rest_of_the_context_in_every_group() -> None:
    facts = pool(layout_for(GPT_OSS_20B, PLAIN), context=2048)
    assert price(Ask((48,)), facts) == Price(2048 // 16 + 9, 1, 2000)


def test_v11_an_index_cache_makes_blocks_larger() -> None:
    config = next(fact.config for fact in FACTS if fact.name == "DeepSeek-V3.2")
    assert layout_for(config).bytes_per_block == 16 * 61 * (1152 + 132)


def test_v12_a_state_hybrid_takes_constant_blocks_and_its_blocks_span_hundreds_of_tokens() -> None:
    layout = layout_for(QWEN35_27B, PLAIN)
    assert layout.block_size == 784
    assert [group.layers for group in layout.groups] == [16, 16, 16, 16]
    assert layout.price(1, 1, CONTEXT) == 4
    assert layout.price(10_000, 1, CONTEXT) == 3 + 13


@pytest.mark.parametrize(
    ("config", "batches", "most"),
    [
        (QWEN35_27B, 1, 2),  # the settled one, and that of the step in flight
        (QWEN35_27B, 2, 3),
        (QWEN35_27B, 4, 5),
        (NEMOTRON_NANO, 1, 3),  # Mamba-2 writes a checkpoint within the last chunk, too
        (NEMOTRON_NANO, 2, 4),
    ],
)
def test_v12_prefix_caching_keeps_more_states_of_a_sequence(
    config: dict[str, object], batches: int, most: int
) -> None:
    plain = layout_for(config, PLAIN)
    caching = layout_for(config, replace(PLAIN, prefix_caching=True, concurrent_batches=batches))
    states = sum(group.kind is Kind.STATE for group in plain.groups)
    prefilling, decoding = (
        caching.price(*shape, CONTEXT) - plain.price(*shape, CONTEXT) for shape in ((50_000, 1), (1, 50_000))
    )
    assert prefilling == (most - 1) * states
    assert decoding == (2 - 1) * states


def test_v12_a_short_prompt_has_no_states_but_those_of_the_blocks_that_it_reaches() -> None:
    layout = layout_for(NEMOTRON_NANO, replace(PLAIN, prefix_caching=True))
    assert layout.price(1, 1, CONTEXT) == len(layout.groups)


def test_v12_states_kept_at_every_border_are_priced_as_many_as_there_are_borders() -> None:
    caching = layout_for(QWEN35_27B, replace(PLAIN, prefix_caching=True, state_mode="all"))
    assert caching.price(10_000, 1, CONTEXT) == 4 * 13


def test_v12_a_prefix_found_within_a_block_has_its_state_copied() -> None:
    whole = replace(PLAIN, prefix_caching=True, match_unit=784)
    part = replace(whole, match_unit=16)
    lone, shared = (layout_for(QWEN35_27B, part, way).price(50_000, 1, CONTEXT) for way in (False, True))
    assert lone == shared == layout_for(QWEN35_27B, whole).price(50_000, 1, CONTEXT) + 4


def test_v12_states_in_flight_may_be_kept_back_once_for_all() -> None:
    serving = replace(PLAIN, prefix_caching=True, concurrent_batches=2)
    each, once = (layout_for(QWEN35_27B, serving, way) for way in (False, True))
    assert once.reserve_blocks == 3 * (3 * 8192 // 784)
    assert once.price(50_000, 1, CONTEXT) == each.price(50_000, 1, CONTEXT) - 3


def test_a_state_mode_that_is_not_known_is_refused() -> None:
    with pytest.raises(UnknownGeometry, match="mamba_cache_mode 'some' is not known: use one of none, align"):
        Serving(state_mode="some")


def test_v12_a_block_size_that_the_engine_reports_is_taken_as_it_is() -> None:
    assert layout_for(QWEN35_27B, replace(PLAIN, block_size=784)) == layout_for(QWEN35_27B, PLAIN)


def test_w1_nothing_is_priced_beyond_the_context() -> None:
    layout = layout_for(GPT_OSS_20B, PLAIN)
    assert layout.price(100, 10**9, 4096) == layout.price(100, 4096 - 99, 4096)


def test_w2_the_last_token_is_not_stored() -> None:
    layout = layout_for(LLAMA_8B, PLAIN)
    assert (layout.price(16, 17, CONTEXT), layout.price(16, 18, CONTEXT)) == (2, 3)


def test_w3_a_window_is_not_charged_for_the_whole_length() -> None:
    layout = layout_for(MISTRAL_7B, replace(PLAIN, max_batched_tokens=2048))
    assert layout.price(30_000, 3000, CONTEXT) == -(-(4095 + 2048 - 1) // 16) + 1


def test_w3_without_the_hybrid_manager_windows_are_kept_whole_in_one_group() -> None:
    layout = layout_for(GPT_OSS_20B, replace(PLAIN, hybrid_manager=False))
    assert [group.layers for group in layout.groups] == [24]
    assert layout.price(4000, 1000, CONTEXT) == 313


def test_a_pool_without_a_geometry_is_priced_as_before() -> None:
    plain, grouped = pool(None), pool(layout_for(LLAMA_8B, PLAIN))
    for prompt, cap in ((1, 1), (16, 17), (16, 18), (100, 30), (5000, 3000)):
        assert blocks_for(prompt, cap, grouped) == blocks_for(prompt, cap, plain)


def test_lookahead_given_for_the_pool_is_priced_too() -> None:
    facts = replace(pool(layout_for(GPT_OSS_20B, PLAIN)), lookahead=16)
    assert blocks_for(16, 17, facts) == 2 * 3


def test_a_request_that_can_never_fit_is_told_so_and_the_cap_that_fits_is_found() -> None:
    facts = pool(layout_for(GPT_OSS_20B, PLAIN), total=100, context=8192)
    assert price(Ask((1000,), 4000), facts) is Reason.KV_CAPACITY_EXCEEDED
    cap = output_cap_that_fits(Ask((700,), 4000), facts, 90, None)
    assert cap is not None
    assert worst_case_blocks(Ask((700,), cap), facts)[0] <= 90
    assert worst_case_blocks(Ask((700,), cap + 1), facts)[0] > 90


def test_a_shared_transient_is_kept_back_once_and_not_charged_to_each_request() -> None:
    shared = layout_for(GEMMA4_26B, PLAIN, shared_transient=True)
    alone = layout_for(GEMMA4_26B, PLAIN)
    assert shared.reserve_blocks == 5 * (2 * 8192 // 16)
    assert pool(shared).usable_blocks == 26214 - shared.reserve_blocks
    assert shared.price(4000, 2000, CONTEXT) <= 1.02 * alone.blocks(4000, 2000, CONTEXT).final
    assert alone.price(4000, 2000, CONTEXT) == 1375


def test_a_reserve_larger_than_the_pool_leaves_nothing_and_does_not_go_below() -> None:
    assert pool(layout_for(GEMMA4_26B, PLAIN, shared_transient=True), total=100).usable_blocks == 0


def test_the_way_that_admits_more_requests_of_a_shape_is_chosen() -> None:
    long, short = (
        layout_for(GEMMA4_26B, PLAIN).tighter(layout_for(GEMMA4_26B, PLAIN, True), 26214, shape, CONTEXT)
        for shape in ((4000, 2000), (100, 50))
    )
    assert long.shared_transient
    assert not short.shared_transient


def test_pipeline_stages_share_the_layers_and_the_fullest_one_sets_the_block() -> None:
    assert stage_ends(32, 4) == [8, 16, 24, 32]
    assert stage_ends(30, 4) == [7, 15, 23, 30]
    assert layout_for(LLAMA_8B, Serving(pp=4)).bytes_per_block == 2_097_152 // 4
    with pytest.raises(UnknownGeometry, match="33"):
        layout_for(LLAMA_8B, Serving(pp=33))


def test_with_decode_context_parallelism_a_block_spans_more_tokens() -> None:
    layout = layout_for(DEEPSEEK_V3, replace(PLAIN, dcp=4))
    assert layout.price(1000, 100, CONTEXT) == -(-1099 // 64)
    with pytest.raises(UnknownGeometry, match="context parallelism"):
        layout_for(GPT_OSS_20B, Serving(dcp=2))


@pytest.mark.parametrize(
    "wrong",
    [{"block_size": 0}, {"tp": 0}, {"draft_tokens": -1}, {"kv_dtype": "float3"}, {"max_batched_tokens": 0}],
)
def test_options_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UnknownGeometry):
        Serving(**wrong)  # type: ignore[arg-type]


def test_a_layout_is_a_value() -> None:
    assert hash(layout_for(GPT_OSS_20B)) == hash(layout_for(from_config(GPT_OSS_20B)))
    assert len({pool(layout_for(GPT_OSS_20B)), pool(layout_for(GPT_OSS_20B))}) == 1


def test_a_bad_pool_is_still_refused() -> None:
    with pytest.raises(Misuse):
        pool(layout_for(GPT_OSS_20B), total=0)
