"""The KV groups of the model behind an engine's pages: which of its options are read, tried, or asked for."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

from model_facts import GEMMA4_26B, GPT_OSS_20B, LLAMA_8B, NEMOTRON_NANO, QWEN35_27B, WHISPER

from engine_pages import vllm
from kvgate.core.geometry import Group, Kind, KVLayout, Serving, from_config, layout_for
from kvgate.core.geometry.groups import form_groups
from kvgate.core.geometry.planned import planned_blocks
from kvgate.core.price import blocks_for
from kvgate.core.records import PoolFacts
from kvgate.wire.engines.finding import found_in
from kvgate.wire.engines.found import Found, Given, Level, Page

CONTEXT = 131_072
BLOCKS = 40_000
DRAFTS = "\n".join(
    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{i}"}} 0.0' for i in range(3)
)


def labels(config: dict[str, Any], serving: Serving, context: int = CONTEXT, **more: str) -> dict[str, str]:
    """What vLLM shows of a model that it runs so, its own figure for the longest request among them."""
    groups, _ = form_groups(from_config(config), serving)
    planned = planned_blocks(groups, serving, serving.in_flight, context)
    return {
        "block_size": str(min(group.block_size for group in groups)),
        "num_gpu_blocks": str(BLOCKS),
        "kv_cache_size_tokens": "1",
        "kv_cache_max_concurrency": "None" if planned is None else str(BLOCKS / planned),
        **more,
    }


def found(shown: dict[str, str], config: dict[str, Any], length: int = CONTEXT, **given: Any) -> Found:
    return found_in("vllm", vllm(shown, context=length), Given(model_config=config, **given))


def layout_in(found: Found) -> KVLayout:
    assert found.facts is not None, found.unknown
    assert found.facts.geometry is not None
    return found.facts.geometry


@pytest.mark.parametrize("batches", [1, 2, 3])
@pytest.mark.parametrize("budget", [2048, 8192, 16_384])
@pytest.mark.parametrize("config", [GEMMA4_26B, GPT_OSS_20B])
def test_what_may_be_in_flight_is_worked_out_of_the_engines_longest_request(
    config: dict[str, Any], budget: int, batches: int
) -> None:
    serving = Serving(max_batched_tokens=budget, concurrent_batches=batches)
    layout = layout_in(found(labels(config, serving), config))

    true = layout_for(config, serving, layout.shared_transient)
    for shape in ((100, 50), (5000, 500), (60_000, 1000), (100_000, 1)):
        price = layout.price(*shape, CONTEXT)
        assert true.price(*shape, CONTEXT) <= price
        if not layout.shared_transient:
            # Kvgate takes two steps to be in flight, of as many tokens together: a block for the second.
            assert price <= true.price(*shape, CONTEXT) + 2 * len(layout.groups)
    assert true.reserve_blocks <= layout.reserve_blocks <= 2 * true.reserve_blocks


def test_a_budget_that_is_none_of_the_usual_ones_is_asked_for_and_taken() -> None:
    odd = Serving(max_batched_tokens=10_000)
    shown = labels(GEMMA4_26B, odd)
    asked = found(shown, GEMMA4_26B)

    assert asked.missing == ("model_config",)
    assert "--max-batched-tokens" in asked.unknown[0]
    assert found(shown, GEMMA4_26B, serving=odd).missing == ()


@pytest.mark.parametrize("tp", [4, 8])
def test_the_configuration_of_another_model_and_a_forgotten_parallelism_explain_nothing(tp: int) -> None:
    shown = labels(GEMMA4_26B, Serving(tp=tp))

    for wrong in (found(shown, GEMMA4_26B), found(labels(GEMMA4_26B, Serving()), GPT_OSS_20B)):
        assert wrong.missing == ("model_config",)
        assert "no number of tokens in flight explains" in wrong.unknown[0]
    assert found(shown, GEMMA4_26B, serving=Serving(tp=tp)).missing == ()


@pytest.mark.parametrize(("block", "context"), [(128, 4096), (64, 2048), (16, 512), (16, 131_072)])
def test_windows_that_span_the_whole_context_are_no_other_model(block: int, context: int) -> None:
    shown = labels(GEMMA4_26B, Serving(block_size=block), context)

    for given in ({}, {"serving": Serving(max_batched_tokens=8192)}):
        assert found(shown, GEMMA4_26B, context, **given).missing == ()


def test_where_the_engine_says_nothing_a_prompt_is_charged_whole_and_a_short_one_as_ever() -> None:
    silent = labels(GPT_OSS_20B, Serving(), kv_cache_max_concurrency="None")
    layout = layout_in(found(silent, GPT_OSS_20B))

    assert not layout.shared_transient
    assert layout.price(100_000, 1, CONTEXT) == 2 * -(-100_000 // 16)
    assert layout.price(500, 100, CONTEXT) == layout_for(GPT_OSS_20B, Serving()).price(500, 100, CONTEXT)


def test_an_older_engine_counts_one_step_and_its_word_says_less() -> None:
    pages = vllm(labels(GPT_OSS_20B, Serving()), context=CONTEXT)
    old = pages | {"/version": Page(200, '{"version": "0.31.2"}')}

    assert (
        layout_in(found_in("vllm", pages, Given(model_config=GPT_OSS_20B))).price(100_000, 1, CONTEXT)
        < 12_500
    )
    assert (
        layout_in(found_in("vllm", old, Given(model_config=GPT_OSS_20B))).price(100_000, 1, CONTEXT) == 12_500
    )


def test_without_its_metrics_no_engine_has_said_that_its_layers_are_alike() -> None:
    pages = vllm(context=4096) | {"/metrics": Page(404)}
    given = Given(total_blocks=20_000, block_size=16, context=4096, model_config=GPT_OSS_20B)

    assert len(layout_in(found_in("vllm", pages, given)).groups) == 2
    alone = found_in("vllm", pages, replace(given, model_config=None))
    assert "hybrid_unpriced" in {finding.code for finding in alone.warnings}


def test_what_an_encoder_takes_is_not_compared() -> None:
    serving = Serving(max_batched_tokens=8192)
    assert planned_blocks([Group(Kind.CROSS, 16)], serving, 8192, 448) is None
    # vLLM plans with the token budget, and takes what the encoder brings.
    shown = labels(WHISPER, serving, 448, kv_cache_max_concurrency=str(BLOCKS / 5400))
    given = replace(serving, encoder_tokens=1500)

    assert found(shown, WHISPER, 448, serving=given).missing == ()


def test_ranks_that_share_a_sum_are_not_refused_for_the_engines_word() -> None:
    shown = labels(GEMMA4_26B, Serving())
    pages = vllm(shown, shown | {"num_gpu_blocks": "42000"}, context=CONTEXT)
    serving = Serving(max_batched_tokens=8192)

    assert found_in("vllm", pages, Given(model_config=GEMMA4_26B, serving=serving)).missing == ()


def test_a_price_below_the_engines_word_is_not_used_unless_every_size_is_given() -> None:
    shown = labels(GEMMA4_26B, Serving(max_batched_tokens=8192))
    plain = GEMMA4_26B | {"layer_types": ["full_attention"] * 30}
    wrong = found(shown, plain, serving=Serving(max_batched_tokens=8192))

    assert wrong.missing == ("model_config",)
    assert "by the engine's own word takes" in wrong.unknown[0]
    assert "tensor and pipeline parallel sizes" in wrong.unknown[0]
    sizes = {"total_blocks": 1000, "block_size": 16, "context": 8192}
    all_given = found(shown, plain, serving=Serving(max_batched_tokens=8192), **sizes)
    assert all_given.facts is not None
    assert [each.level for each in all_given.warnings if each.code == "price_below_engine"] == [Level.UNSAFE]


def test_a_model_whose_layers_the_engine_keeps_whole_has_one_group_whatever_its_configuration_says() -> None:
    longest = -(-CONTEXT // 16)
    tokens = round(BLOCKS / longest * CONTEXT)
    shown = labels(GPT_OSS_20B, Serving(hybrid_manager=False), kv_cache_size_tokens=str(tokens))
    layout = layout_in(found(shown, GPT_OSS_20B))

    assert len(layout.groups) == 1
    assert layout.price(4000, 97, CONTEXT) == 256


def test_a_drafter_whose_kind_is_not_known_may_write_one_slot_more() -> None:
    pages = vllm(labels(LLAMA_8B, Serving(draft_tokens=3)), context=CONTEXT, more=DRAFTS)
    layout = layout_in(found_in("vllm", pages, Given(model_config=LLAMA_8B)))

    assert (layout.lookahead, layout.drafts_in_flight) == (4, 6)


@pytest.mark.parametrize(
    ("config", "shown", "serving"),
    [
        (QWEN35_27B, {"mamba_cache_mode": "align"}, Serving(state_mode="align")),
        (QWEN35_27B, {"mamba_cache_mode": "none"}, Serving(state_mode="align")),
        (
            QWEN35_27B,
            {"mamba_cache_mode": "none", "enable_prefix_caching": "False"},
            Serving(state_mode="none"),
        ),
        (QWEN35_27B, {"mamba_cache_mode": "all"}, Serving(state_mode="all")),
        (QWEN35_27B, {"prefix_match_unit": "16"}, Serving(match_unit=16)),
        (QWEN35_27B, {"prefix_match_unit": "None"}, Serving()),
        (NEMOTRON_NANO, {"prefix_cache_retention_interval": "0"}, Serving()),
        (NEMOTRON_NANO, {"prefix_cache_retention_interval": "None"}, Serving(retention_interval=None)),
        (NEMOTRON_NANO, {"prefix_cache_retention_interval": "4096"}, Serving(retention_interval=4096)),
    ],
)
def test_how_states_are_kept_is_read(config: dict[str, Any], shown: dict[str, str], serving: Serving) -> None:
    serving = replace(serving, max_batched_tokens=8192)
    mine = layout_in(
        found(labels(config, serving, **shown), config, serving=Serving(max_batched_tokens=8192))
    )
    true = layout_for(config, replace(serving, block_size=mine.block_size), mine.shared_transient)

    for shape in ((1, 1), (2000, 100), (50_000, 50_000)):
        assert mine.price(*shape, CONTEXT) == true.price(*shape, CONTEXT)


def test_what_prefix_caching_costs_beside_states_is_said() -> None:
    caching = found(labels(QWEN35_27B, Serving(), mamba_cache_mode="align"), QWEN35_27B)
    off = labels(QWEN35_27B, Serving(prefix_caching=False), enable_prefix_caching="False")

    (note,) = [each for each in caching.warnings if each.code == "states_kept"]
    # Two blocks of 784 tokens, and two states of three groups instead of one.
    assert "a request of 1,000 + 500 tokens takes 8 blocks, without it 5" in note.what
    assert "states_kept" not in {each.code for each in found(off, QWEN35_27B).warnings}
    assert "states_kept" not in {each.code for each in found(labels(LLAMA_8B, Serving()), LLAMA_8B).warnings}


def test_a_mode_of_states_that_is_not_known_is_asked_about() -> None:
    unknown = found(labels(QWEN35_27B, Serving(), mamba_cache_mode="some"), QWEN35_27B)

    assert unknown.missing == ("model_config",)
    assert "mamba_cache_mode 'some' is not known" in unknown.unknown[0]


def test_a_cache_that_is_moved_elsewhere_is_no_ground_for_more_than_the_margin() -> None:
    plain, moved = (found_in("vllm", vllm({"kv_offloading_size": size})) for size in ("None", "4.0"))

    assert plain.is_exact
    assert not moved.is_exact
    assert "kv_offloading" in {finding.code for finding in moved.warnings}
    assert "kv_offloading" not in {finding.code for finding in plain.warnings}


def test_drafts_are_stored_beyond_a_context_that_is_not_the_engines_own() -> None:
    own = found_in("vllm", vllm(context=4096, more=DRAFTS)).facts
    lower = found_in("vllm", vllm(context=4096, more=DRAFTS), Given(context=2048)).facts
    assert own is not None
    assert lower is not None

    assert own.engine_context == lower.engine_context == 4096
    assert blocks_for(100, 4096 - 100, replace(own, context=4096)) == 4096 // 128
    # The engine goes on for what it drafts: one block more.
    assert blocks_for(100, 2048 - 100, lower) == 2048 // 128 + 1
    unknown = PoolFacts(1000, 16, 2048, lookahead=8)
    assert blocks_for(1000, 1048, unknown) == 2048 // 16 + 1
