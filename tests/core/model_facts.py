"""The facts of 50 models that decide their KV cache: the fields a configuration needs, and the answer.

Numbers are published facts about the models (bf16, one GPU), written out here; the files that they
stand in are not part of the project.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Fact:
    """One row: `full` and `sliding` bytes a token, `indexer` bytes a token beside `full`, layers."""

    name: str
    config: dict[str, Any]
    full: int
    sliding: int = 0
    indexer: int = 0
    state: int = 0
    layers: dict[str, int] = field(default_factory=dict)


def gqa(
    kind: str, layers: int, heads: int, kv: int, hidden: int, dim: int | None = None, **more: Any
) -> dict[str, Any]:
    config = {
        "model_type": kind,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "hidden_size": hidden,
        "max_position_embeddings": 131072,
    }
    return config | ({"head_dim": dim} if dim else {}) | more


def mla(kind: str, layers: int, heads: int = 128, **more: Any) -> dict[str, Any]:
    # The head counts and head sizes here are what must not be read.
    return gqa(kind, layers, heads, heads, 7168, kv_lora_rank=512, qk_rope_head_dim=64, v_head_dim=128) | more


def types(pattern: str, **names: str) -> list[str]:
    """`layer_types` from a string of letters."""
    words = {"f": "full_attention", "s": "sliding_attention", "l": "linear_attention"} | names
    return [words[letter] for letter in pattern]


def qwen35(kind: str, layers: int, heads: int, kv: int, hidden: int, value_heads: int) -> dict[str, Any]:
    text = gqa(
        f"{kind}_text",
        layers,
        heads,
        kv,
        hidden,
        256,
        layer_types=types("lllf" * (layers // 4)),
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=value_heads,
        mamba_ssm_dtype="float32",
        mtp_num_hidden_layers=1,
    )
    return {"model_type": kind, "text_config": text, "vision_config": {"hidden_size": 1152, "num_heads": 16}}


def gdn_bytes(layers: int, value_heads: int, ssm_bytes: int = 4) -> int:
    return layers * (3 * (2 * 128 * 16 + value_heads * 128) * 2 + value_heads * 128 * 128 * ssm_bytes)


def mamba2_bytes(layers: int, heads: int, dim: int, size: int, groups: int, ssm_bytes: int = 4) -> int:
    return layers * (3 * (heads * dim + 2 * groups * size) * 2 + heads * dim * size * ssm_bytes)


def nemotron_h(
    pattern: str, heads: int, kv: int, hidden: int, mamba_heads: int, size: int = 128, **more: Any
) -> dict[str, Any]:
    return (
        gqa("nemotron_h", len(pattern), heads, kv, hidden, 128)
        | {
            "hybrid_override_pattern": pattern,
            "conv_kernel": 4,
            "n_groups": 8,
            "ssm_state_size": size,
            "mamba_num_heads": mamba_heads,
            "mamba_head_dim": 64,
            "mamba_ssm_cache_dtype": "float32",
        }
        | more
    )


NAS_HEADS = [8, 8, None, 16, 8, None, 4, 8] * 10
NAS = {
    "model_type": "nemotron-nas",
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": None,
    "hidden_size": 8192,
    "max_position_embeddings": 131072,
    "block_configs": [
        {"attention": {"n_heads_in_group": group, "no_op": group is None, "replace_with_linear": False}}
        for group in NAS_HEADS
    ],
}
KDA = [i + 1 for i in range(93) if (i + 1) % 4 and i + 1 != 93]
KIMI_K3 = mla(
    "kimi_linear",
    93,
    96,
    linear_attn_config={
        "full_attn_layers": sorted(set(range(1, 94)) - set(KDA)),
        "kda_layers": KDA,
        "num_heads": 96,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
)
GEMMA4_26B = gqa(
    "gemma4_text",
    30,
    16,
    8,
    2816,
    256,
    global_head_dim=512,
    num_global_key_value_heads=2,
    attention_k_eq_v=True,
    sliding_window=1024,
    layer_types=types("sssssf" * 5),
    num_kv_shared_layers=0,
)
GEMMA4_31B = gqa(
    "gemma4_text",
    60,
    32,
    16,
    5376,
    256,
    global_head_dim=512,
    num_global_key_value_heads=4,
    attention_k_eq_v=True,
    sliding_window=1024,
    layer_types=types("sssssf" * 10),
    num_kv_shared_layers=0,
)
GPT_OSS_20B = gqa("gpt_oss", 24, 64, 8, 2880, 64, sliding_window=128, layer_types=types("sf" * 12))
LLAMA4 = {
    "model_type": "llama4",
    "text_config": gqa("llama4_text", 48, 40, 8, 5120, 128, attention_chunk_size=8192),
}
LLAMA_8B = gqa("llama", 32, 32, 8, 4096)
GEMMA3_27B = {
    "model_type": "gemma3",
    "text_config": gqa("gemma3_text", 62, 32, 16, 5376, 128, sliding_window=1024),
}
QWEN35_27B = qwen35("qwen3_5", 64, 24, 4, 5120, 48)
NANO_PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
NEMOTRON_NANO = nemotron_h(NANO_PATTERN, 32, 2, 2688, 64)
MISTRAL_7B = gqa("mistral", 32, 32, 8, 4096, sliding_window=4096)
DEEPSEEK_V3 = mla("deepseek_v3", 61, num_nextn_predict_layers=1)
DEEPSEEK_V32 = mla("deepseek_v32", 61, index_head_dim=128, index_n_heads=64)

WHISPER = {
    "model_type": "whisper",
    "decoder_layers": 4,
    "decoder_attention_heads": 6,
    "d_model": 384,
    "encoder_layers": 4,
    "max_source_positions": 1500,
    "max_target_positions": 448,
}

FACTS = [
    Fact("Llama-3.1-8B", LLAMA_8B, 131072),
    Fact("Llama-3.1-70B", gqa("llama", 80, 64, 8, 8192), 327680),
    Fact("Llama-3.1-405B", gqa("llama", 126, 128, 8, 16384), 516096),
    Fact("Llama-3.2-3B", gqa("llama", 28, 24, 8, 3072), 114688),
    Fact(
        "Llama-4 Scout and Maverick",
        LLAMA4,
        49152,
        147456,
        layers={"full_attention": 12, "chunked_attention": 36},
    ),
    Fact("Mixtral-8x7B", gqa("mixtral", 32, 32, 8, 4096, sliding_window=None), 131072),
    Fact("Mixtral-8x22B", gqa("mixtral", 56, 48, 8, 6144), 229376),
    Fact("Qwen3-0.6B and 1.7B", gqa("qwen3", 28, 16, 8, 1024, 128, use_sliding_window=False), 114688),
    Fact("Qwen3-8B", gqa("qwen3", 36, 32, 8, 4096, 128), 147456),
    Fact("Qwen3-32B", gqa("qwen3", 64, 64, 8, 5120, 128), 262144),
    Fact("Qwen3-30B-A3B", gqa("qwen3_moe", 48, 32, 4, 2048, 128), 98304),
    Fact("Qwen3-235B-A22B", gqa("qwen3_moe", 94, 64, 4, 4096, 128), 192512),
    Fact("Qwen3-Coder-480B", gqa("qwen3_moe", 62, 96, 8, 6144, 128), 253952),
    Fact(
        "Qwen3-Next-80B-A3B",
        gqa("qwen3_next", 48, 16, 2, 2048, 256, full_attention_interval=4)
        | {f"linear_{name}": value for name, value in (("conv_kernel_dim", 4), ("key_head_dim", 128))}
        | {"linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32},
        24576,
        state=gdn_bytes(36, 32, 2),
        layers={"full_attention": 12, "state": 36},
    ),
    Fact(
        "Qwen3.5-27B", QWEN35_27B, 65536, state=gdn_bytes(48, 48), layers={"full_attention": 16, "state": 48}
    ),
    Fact("Qwen3.5-35B-A3B", qwen35("qwen3_5_moe", 40, 16, 2, 2048, 32), 20480, state=gdn_bytes(30, 32)),
    Fact("Qwen3.5-122B-A10B", qwen35("qwen3_5_moe", 48, 32, 2, 3072, 64), 24576, state=gdn_bytes(36, 64)),
    Fact("Qwen3.5-397B-A17B", qwen35("qwen3_5_moe", 60, 32, 2, 4096, 64), 30720, state=gdn_bytes(45, 64)),
    Fact("MiniMax-M2.5 and 2.7", gqa("minimax_m2", 62, 48, 8, 3072, 128), 253952),
    Fact("MiniMax-M3", gqa("minimax_m3", 60, 64, 4, 6144, 128, sparse_attention_config={"n": 1}), 122880),
    Fact(
        "MiMo-7B",
        gqa("mimo", 36, 32, 8, 4096, 128, sliding_window=32768) | {"max_position_embeddings": 32768},
        147456,
    ),
    Fact(
        "MiMo-V2-Flash",
        gqa("mimo_v2_flash", 48, 64, 4, 4096, 192, v_head_dim=128, sliding_window=128)
        | {"swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128}
        | {"attention_chunk_size": 128, "hybrid_layer_pattern": [0, *([1] * 4), 0, *([1] * 5 + [0]) * 7]},
        23040,
        199680,
        layers={"full_attention": 9, "sliding_attention": 39},
    ),
    Fact("DeepSeek-V3, R1 and V3.1", DEEPSEEK_V3, 70272),
    Fact("DeepSeek-V3.2", DEEPSEEK_V32, 70272, indexer=8052),
    Fact("Kimi-K2, K2.5 and K2.6", {"model_type": "kimi_k25", "text_config": mla("kimi_k2", 61, 64)}, 70272),
    Fact(
        "Kimi-K3",
        {"model_type": "kimi_k3", "text_config": KIMI_K3},
        27648,
        state=69 * 6512640,
        layers={"mla": 24},
    ),
    Fact("GLM-5 to 5.3", mla("glm_moe_dsa", 78, 64, head_dim=192, index_head_dim=128), 89856, indexer=10296),
    Fact("GLM-4.5", gqa("glm4_moe", 92, 96, 8, 5120, 128), 376832),
    Fact("GLM-4.7-Flash", mla("glm4_moe_lite", 47, 20), 54144),
    Fact("Gemma-4-26B-A4B", {"model_type": "gemma4", "text_config": GEMMA4_26B}, 20480, 204800),
    Fact("Gemma-4-31B", {"model_type": "gemma4", "text_config": GEMMA4_31B}, 81920, 819200),
    Fact("Gemma-3-27B", GEMMA3_27B, 81920, 425984, layers={"full_attention": 10, "sliding_attention": 52}),
    Fact(
        "gemma3n-E4B",
        gqa("gemma3n_text", 35, 8, 2, 2048, 256, num_kv_shared_layers=15, sliding_window=512)
        | {"layer_types": types("ssssf" * 7)},
        8192,
        32768,  # 40,960 together
    ),
    Fact("gpt-oss-20b", GPT_OSS_20B, 24576, 24576),
    Fact("gpt-oss-120b", gqa("gpt_oss", 36, 64, 8, 2880, 64, sliding_window=128), 36864, 36864),
    Fact(
        "Step-3.7-Flash",
        gqa("step3p7", 45, 64, 8, 4096, 128, sliding_window=512, num_nextn_predict_layers=3)
        | {"layer_types": types("fsss" * 11 + "f")},
        49152,
        135168,
    ),
    Fact(
        "Nemotron-3-Nano-30B",
        NEMOTRON_NANO,
        6144,
        state=mamba2_bytes(23, 64, 64, 128, 8),
        layers={"state": 23},
    ),
    Fact(
        "Nemotron-3-Super-120B",
        nemotron_h("*EMEMEMEMEM" * 8, 32, 2, 4096, 128),
        8192,
        state=mamba2_bytes(40, 128, 64, 128, 8),
    ),
    Fact(
        "Nemotron-3-Ultra-550B",
        {key: value for key, value in nemotron_h("M", 64, 2, 8192, 256).items() if key != "num_hidden_layers"}
        | {"hybrid_override_pattern": None, "layers_block_type": ["mamba", "moe"] * 48 + ["attention"] * 12},
        12288,
        state=mamba2_bytes(48, 256, 64, 128, 8),
    ),
    Fact(
        "Nemotron-H-56B",
        nemotron_h("M-" * 54 + "*" * 10, 64, 8, 8192, 256, 256, mamba_ssm_cache_dtype=None),
        40960,
        state=mamba2_bytes(54, 256, 64, 256, 8, 2),
    ),
    # Six of eight layers attend: with 8, 8, 4, 8, 16 and 8 KV heads.
    Fact("Nemotron-Super-49B", NAS, 10 * 52 * 2 * 128 * 2),
    Fact(
        "DBRX",
        {
            "model_type": "dbrx",
            "n_layers": 40,
            "n_heads": 48,
            "d_model": 6144,
            "attn_config": {"kv_n_heads": 8},
        },
        163840,
    ),
    Fact(
        "Falcon-7B",
        {"model_type": "falcon", "num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544}
        | {"multi_query": True, "num_kv_heads": 71},
        8192,
    ),
    Fact(
        "Falcon-40B",
        {"model_type": "falcon", "num_hidden_layers": 60, "num_attention_heads": 128, "hidden_size": 8192}
        | {"new_decoder_architecture": True, "num_kv_heads": 8},
        122880,
    ),
    Fact(
        "MPT-7B",
        {"model_type": "mpt", "n_layers": 32, "n_heads": 32, "d_model": 4096, "attn_config": {}},
        524288,
    ),
    Fact("Llama-2-7B", gqa("llama", 32, 32, 32, 4096), 524288),
    Fact("ERNIE-4.5-21B", gqa("ernie4_5_moe", 28, 20, 4, 2560, 128), 57344),
    Fact("LongCat-Flash", mla("longcat_flash", 56, 64, num_layers=28), 64512, layers={"mla": 56}),
    Fact("Seed-OSS-36B", gqa("seed_oss", 64, 80, 8, 5120, 128), 262144),
    Fact("SmolLM3-3B", gqa("smollm3", 36, 16, 4, 2048), 73728),
    Fact("Mistral-7B-v0.1", MISTRAL_7B, 0, 131072, layers={"sliding_attention": 32}),
    Fact(
        "Mamba-Codestral-7B",
        {
            "model_type": "mamba2",
            "num_hidden_layers": 64,
            "hidden_size": 4096,
            "num_heads": 128,
            "head_dim": 64,
        }
        | {"state_size": 128, "n_groups": 8, "conv_kernel": 4},
        0,
        state=mamba2_bytes(64, 128, 64, 128, 8, 2),
        layers={"state": 64},
    ),
]
# Compressed KV: no formula, so kvgate asks.
DEEPSEEK_V4 = gqa(
    "deepseek_v4", 43, 64, 1, 4096, 512, compress_ratios=[0, 4, 128] * 14 + [0], sliding_window=128
)
