"""Every model of the table comes out as in the table, and what is not known is said so."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from model_facts import (
    DEEPSEEK_V3,
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    FACTS,
    GEMMA3_27B,
    KIMI_K3,
    LLAMA_8B,
    NEMOTRON_NANO,
    WHISPER,
    Fact,
    gqa,
)

from kvgate.core.geometry import Kind, UnknownGeometry, footprint, from_config, layout_for

FOLDER = os.environ.get("KVGATE_MODEL_CONFIGS")
# Configurations at hand, where a folder of them is named; the facts above need none.
FILES = sorted(Path(FOLDER).glob("*.json")) if FOLDER else []


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.name)
def test_a_model_takes_the_bytes_of_the_table(fact: Fact) -> None:
    geometry = from_config(fact.config)
    size = footprint(geometry)
    assert size.full_attention_bytes_per_token == fact.full
    assert size.sliding_bytes_per_token == fact.sliding
    assert size.indexer_bytes_per_token == fact.indexer
    assert size.state_bytes_per_sequence == fact.state
    assert {kind: geometry.count(Kind(kind)) for kind in fact.layers} == fact.layers


def test_the_table_has_fifty_models() -> None:
    assert len(FACTS) + 1 >= 50  # DeepSeek-V4 is the one that is refused


def read_or_way_out(config: dict[str, Any]) -> str:
    """`read`, or what the refusal says."""
    try:
        return "read" if from_config(config).layers else "empty"
    except UnknownGeometry as refused:
        return str(refused)


def test_files_at_hand_are_read_or_refused_with_a_way_out() -> None:
    answers = {path.name: read_or_way_out(json.loads(path.read_text())) for path in FILES}
    assert {name: a for name, a in answers.items() if a != "read" and "[pool]" not in a} == {}


def test_the_known_sizes_of_states_are_those_derived_from_the_engine() -> None:
    assert footprint(from_config(NEMOTRON_NANO)).state_bytes_per_sequence == 49_082_368
    assert footprint(from_config(KIMI_K3)).state_bytes_per_sequence == 449_372_160


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        ({}, "no model_type"),
        ({"model_type": "brand_new"}, "'brand_new'"),
        (DEEPSEEK_V4, "compress_ratios"),
        (without(LLAMA_8B, "num_hidden_layers"), "num_hidden_layers"),
        (without(LLAMA_8B, "num_attention_heads", "num_key_value_heads"), "num_attention_heads"),
        (without(LLAMA_8B, "hidden_size"), "hidden_size"),
        (without(DEEPSEEK_V3, "kv_lora_rank"), "kv_lora_rank"),
        (without(DEEPSEEK_V3, "qk_rope_head_dim"), "qk_rope_head_dim"),
        (LLAMA_8B | {"num_hidden_layers": "many"}, "'many'"),
        (LLAMA_8B | {"num_key_value_heads": -8}, "-8"),
        (LLAMA_8B | {"layer_types": ["full_attention"] * 31}, "31"),
        (LLAMA_8B | {"layer_types": ["mystery"] * 32}, "'mystery'"),
        (LLAMA_8B | {"layer_types": ["linear_attention"] * 32}, "state layers"),
        (LLAMA_8B | {"layer_types": ["sliding_attention"] * 32}, "sliding_window"),
        (NEMOTRON_NANO | {"hybrid_override_pattern": "M" * 51 + "?"}, "'?'"),
        (NEMOTRON_NANO | {"n_groups": None}, "n_groups"),
        (NEMOTRON_NANO | {"mamba_ssm_cache_dtype": "float7"}, "float7"),
        (without(KIMI_K3, "linear_attn_config"), "linear_attn_config"),
    ],
)
def test_what_is_not_known_is_named_and_asked_for_instead_of_guessed(
    config: dict[str, Any], missing: str
) -> None:
    with pytest.raises(UnknownGeometry) as refused:
        from_config(config)
    assert missing in str(refused.value)
    assert "[pool]" in str(refused.value)


def test_a_configuration_that_is_no_object_is_refused() -> None:
    with pytest.raises(UnknownGeometry):
        from_config([1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["text_config", "llm_config", "language_config"])
def test_the_language_model_inside_a_multimodal_one_is_found(name: str) -> None:
    wrapped = {"model_type": "some_vl", name: LLAMA_8B, "vision_config": {"num_hidden_layers": 99}}
    assert from_config(wrapped).layers == from_config(LLAMA_8B).layers


def test_a_nested_thinker_is_found() -> None:
    wrapped = {"model_type": "omni", "thinker_config": {"text_config": LLAMA_8B, "num_attention_heads": 3}}
    assert from_config(wrapped).layers == from_config(LLAMA_8B).layers


def test_quantised_weights_do_not_change_the_cache() -> None:
    quantised = LLAMA_8B | {"quantization_config": {"bits": 4, "quant_method": "gptq", "head_dim": 7}}
    assert from_config(quantised) == from_config(LLAMA_8B)


def test_w5_w6_mla_is_not_doubled_and_its_head_count_and_sizes_are_decoys() -> None:
    decoys = DEEPSEEK_V3 | {"num_key_value_heads": 1, "head_dim": 64, "v_head_dim": 9999}
    assert footprint(from_config(decoys)).full_attention_bytes_per_token == 61 * (512 + 64) * 2


def test_w6_head_dim_wins_over_hidden_by_heads() -> None:
    qwen = gqa("qwen3", 64, 64, 8, 5120, 128)
    assert footprint(from_config(qwen)).full_attention_bytes_per_token == 262144
    assert footprint(from_config(without(qwen, "head_dim"))).full_attention_bytes_per_token == 163840


def test_w3_layers_that_share_anothers_kv_keep_nothing() -> None:
    own = gqa("gemma3n_text", 10, 8, 2, 2048, 256)
    assert len(from_config(own | {"num_kv_shared_layers": 4}).layers) == len(from_config(own).layers) - 4


def test_v6_kv_heads_divide_by_tensor_parallelism_down_to_one_and_mla_does_not() -> None:
    llama, deepseek = from_config(LLAMA_8B), from_config(DEEPSEEK_V3)
    full = footprint(llama).full_attention_bytes_per_token
    assert footprint(llama, tp=8).full_attention_bytes_per_token == full // 8
    assert footprint(llama, tp=16).full_attention_bytes_per_token == full // 8
    assert footprint(deepseek, tp=8) == footprint(deepseek)


def test_v11_index_caches_and_per_head_scales_are_counted() -> None:
    plain = footprint(from_config(DEEPSEEK_V32), "fp8")
    assert (plain.full_attention_bytes_per_token, plain.indexer_bytes_per_token) == (61 * 656, 61 * 132)
    llama = from_config(LLAMA_8B)
    assert footprint(llama, "fp8").full_attention_bytes_per_token == 65536
    assert footprint(llama, "fp8_per_token_head").full_attention_bytes_per_token == 65536 + 32 * 8 * 8
    assert footprint(llama, "int4_per_token_head").full_attention_bytes_per_token == 32768 + 32 * 8 * 8
    assert footprint(llama, "nvfp4").full_attention_bytes_per_token == 32 * 8 * 2 * (64 + 8)
    assert footprint(from_config(DEEPSEEK_V3), "nvfp4_ds_mla").full_attention_bytes_per_token == 61 * 352


def test_an_unknown_cache_type_is_refused() -> None:
    with pytest.raises(UnknownGeometry, match="float3"):
        footprint(from_config(LLAMA_8B), "float3")
    with pytest.raises(UnknownGeometry, match="MLA"):
        footprint(from_config(LLAMA_8B), "fp8_ds_mla")


def test_draft_layers_count_only_when_they_draft() -> None:
    deepseek = from_config(DEEPSEEK_V3)
    assert footprint(deepseek).full_attention_bytes_per_token == 61 * 1152
    assert footprint(deepseek, with_drafts=True).full_attention_bytes_per_token == 62 * 1152


def test_a_window_as_long_as_the_context_is_no_window_and_one_switched_off_neither() -> None:
    mistral = gqa("mistral", 32, 32, 8, 4096, sliding_window=131072)
    assert from_config(mistral).count(Kind.SLIDING) == 0
    qwen = gqa("qwen2", 28, 28, 4, 3584, sliding_window=4096, use_sliding_window=False)
    assert from_config(qwen).count(Kind.SLIDING) == 0
    assert from_config(qwen | {"use_sliding_window": True, "max_window_layers": 20}).count(Kind.SLIDING) == 8


def test_every_sixth_layer_of_gemma_3_is_full_where_its_file_says_no_pattern() -> None:
    kinds = [layer.kind for layer in from_config(GEMMA3_27B).layers]
    assert [i for i, kind in enumerate(kinds) if kind is Kind.FULL] == list(range(5, 62, 6))


def test_llama_4_takes_its_list_of_layers_without_rope() -> None:
    config = gqa("llama4_text", 4, 40, 8, 5120, 128, attention_chunk_size=64, no_rope_layers=[0, 1, 1, 0])
    assert [layer.kind for layer in from_config(config).layers] == [
        Kind.FULL,
        Kind.CHUNKED,
        Kind.CHUNKED,
        Kind.FULL,
    ]


MLLAMA = gqa("mllama_text_model", 40, 32, 8, 4096, cross_attention_layers=[3, 8, 13, 18, 23, 28, 33, 38])


def test_an_encoder_decoder_keeps_its_own_tokens_and_the_encoders() -> None:
    geometry = from_config(WHISPER)
    size = footprint(geometry)
    assert size.full_attention_bytes_per_token == size.cross_bytes_per_token == 4 * 6 * 64 * 2 * 2
    assert layout_for(geometry).fixed == 94  # ceil(1500 / 16)


def test_cross_attention_to_images_asks_how_many_tokens_they_are() -> None:
    with pytest.raises(UnknownGeometry, match="--encoder-tokens"):
        layout_for(MLLAMA)


JAMBA = gqa("jamba", 32, 32, 8, 4096, attn_layer_period=8, attn_layer_offset=4) | {
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
FALCON_H1 = gqa("falcon_h1", 4, 32, 8, 4096) | {
    "mamba_n_heads": 128,
    "mamba_d_head": 8,
    "mamba_d_state": 256,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
}
RECURRENT_GEMMA = gqa("recurrent_gemma", 6, 10, 10, 2560, 256) | {
    "block_types": ["recurrent", "recurrent", "attention"],
    "attention_window_size": 2048,
    "lru_width": 2560,
    "conv1d_width": 4,
}
RWKV = {"model_type": "rwkv", "num_hidden_layers": 32, "hidden_size": 4096, "context_length": 1024}
LFM2 = gqa("lfm2", 4, 32, 8, 2048) | {
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "conv_L_cache": 3,
    "conv_dim": 2048,
}
MINIMAX_01 = gqa("minimax", 2, 32, 8, 4096) | {"layer_types": ["linear_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("config", "states", "attention", "state_bytes"),
    [
        (JAMBA, 28, 4, 28 * (3 * 8192 * 2 + 8192 * 16 * 2)),
        (FALCON_H1, 4, 4, 4 * (3 * (1024 + 512) * 2 + 1024 * 256 * 2)),
        (RECURRENT_GEMMA, 4, 2, 4 * (3 * 2560 * 2 + 2560 * 4)),
        (RWKV, 32, 0, 32 * (2 * 4096 * 2 + 3 * 4096 * 4)),
        (LFM2, 3, 1, 3 * 2 * 2048 * 2),
        (MINIMAX_01, 1, 1, 32 * 128 * 128 * 2),
    ],
    ids=["jamba", "falcon-h1", "recurrent-gemma", "rwkv", "lfm2", "minimax-text-01"],
)
def test_recurrent_layers_keep_a_state_and_no_tokens(
    config: dict[str, Any], states: int, attention: int, state_bytes: int
) -> None:
    geometry = from_config(config)
    assert geometry.count(Kind.STATE) == states
    assert len(geometry.layers) - states == attention
    assert footprint(geometry).state_bytes_per_sequence == state_bytes


def test_a_state_is_divided_by_tensor_parallelism_and_its_groups_are_repeated() -> None:
    geometry = from_config(FALCON_H1)
    # One group for each of four ranks: 1024 channels and 4 x 2 x 256 of groups, by four.
    assert footprint(geometry, tp=4).state_bytes_per_sequence == 4 * (3 * (256 + 512) * 2 + 256 * 256 * 2)
