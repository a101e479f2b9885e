"""Sizes of the states that recurrent layers keep for a sequence instead of KV.

Promise: the shapes are those that vLLM allocates (its mamba_utils), whole-model; unknown ones raise.
"""

from __future__ import annotations

from kvgate.core.geometry.fields import Fields, unknown
from kvgate.core.geometry.layers import State

_BYTES = {"float32": 4, "fp32": 4, "bfloat16": 2, "float16": 2, "half": 2, "bf16": 2, "fp16": 2}


def ssm_bytes(fields: Fields) -> int | None:
    """Bytes of one element of the recurrent state, where the configuration says it."""
    name = fields.get("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
    if name is None or name == "auto":
        return None
    if name not in _BYTES:
        raise unknown(f"the recurrent state's type {name!r} (mamba_ssm_cache_dtype) is not known")
    return _BYTES[name]


def gated_delta_net(fields: Fields) -> State:
    """Qwen3-Next and Qwen3.5: keys, queries and values through one convolution, one matrix a head."""
    value_heads, key_heads = fields.need("linear_num_value_heads"), fields.need("linear_num_key_heads")
    value_dim, key_dim = fields.need("linear_value_head_dim"), fields.need("linear_key_head_dim")
    return State(
        conv_rows=fields.need("linear_conv_kernel_dim") - 1,
        conv_width=2 * key_dim * key_heads + value_dim * value_heads,
        ssm=value_heads * value_dim * key_dim,
        ssm_bytes=ssm_bytes(fields),
    )


def kimi_delta(fields: Fields) -> State:
    """Kimi Delta Attention: as gated delta net with equal heads; the matrix is fp32 unless said."""
    linear = fields.inner("linear_attn_config")
    heads, dim = linear.need("num_heads"), linear.need("head_dim")
    return State(
        conv_rows=linear.need("short_conv_kernel_size") - 1,
        conv_width=3 * heads * dim,
        ssm=heads * dim * dim,
        ssm_bytes=ssm_bytes(fields) or 4,
        checkpoints=1,
    )


def mamba2(fields: Fields) -> State:
    """Mamba-2 under its many spellings: Nemotron-H, Bamba, Granite, Falcon-H1, Zamba2, Codestral."""
    heads = fields.need("mamba_num_heads", "n_mamba_heads", "mamba_n_heads", "num_heads")
    dim = fields.need("mamba_head_dim", "mamba_headdim", "mamba_d_head", "head_dim")
    size = fields.need("ssm_state_size", "mamba_d_state", "state_size")
    groups = fields.need("mamba_n_groups", "mamba_ngroups", "n_groups")
    return State(
        conv_rows=fields.need("conv_kernel", "mamba_d_conv") - 1,
        conv_width=heads * dim,
        groups=groups,
        group_width=size,
        ssm=heads * dim * size,
        ssm_bytes=ssm_bytes(fields),
        checkpoints=1,
    )


def mamba1(fields: Fields) -> State:
    """Mamba-1 (Jamba, Falcon-Mamba): one state vector a channel."""
    width = fields.maybe("intermediate_size") if fields.model_type in ("mamba", "falcon_mamba") else None
    width = width or fields.need("hidden_size") * fields.need("mamba_expand", "expand")
    size = fields.need("mamba_d_state", "state_size")
    return State(
        conv_rows=fields.need("mamba_d_conv", "conv_kernel") - 1,
        conv_width=width,
        ssm=width * size,
        ssm_bytes=ssm_bytes(fields),
    )


def lightning(fields: Fields) -> State:
    """MiniMax-Text-01: one matrix a head, no convolution."""
    heads = fields.need("num_attention_heads")
    dim = fields.maybe("head_dim") or fields.need("hidden_size") // heads
    return State(ssm=heads * dim * dim, ssm_bytes=ssm_bytes(fields))


def short_conv(fields: Fields) -> State:
    """LFM2: only the last rows before a short convolution."""
    return State(conv_rows=fields.need("conv_L_cache") - 1, conv_width=fields.need("conv_dim", "hidden_size"))


def rg_lru(fields: Fields) -> State:
    """RecurrentGemma: a short convolution and one fp32 vector."""
    width = fields.need("lru_width")
    return State(conv_rows=fields.need("conv1d_width") - 1, conv_width=width, ssm=width, ssm_bytes=4)


def rwkv(fields: Fields) -> State:
    """RWKV-4: the last token's two vectors, and three fp32 sums."""
    width = fields.maybe("attention_hidden_size") or fields.need("hidden_size")
    return State(conv_rows=2, conv_width=fields.need("hidden_size"), ssm=3 * width, ssm_bytes=4)
