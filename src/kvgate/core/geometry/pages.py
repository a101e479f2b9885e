"""Bytes that one layer takes for a token or a sequence on one GPU: dtype and tensor parallelism.

Promise: the figures are vLLM's page sizes (its kv_cache_interface): KV heads are divided by tensor
parallelism down to one, an MLA latent is not divided, scales and index caches are counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvgate.core.geometry.layers import Kind, Layer, ModelGeometry, UnknownGeometry

# Bits of one element.
_BITS = {
    "auto": 16,
    "bfloat16": 16,
    "float16": 16,
    "float32": 32,
    "fp8": 8,
    "fp8_e4m3": 8,
    "fp8_e5m2": 8,
    "int8_per_token_head": 8,
    "fp8_per_token_head": 8,
    "int4_per_token_head": 4,
}
KV_DTYPES = (*_BITS, "nvfp4", "fp8_ds_mla", "nvfp4_ds_mla")
# Latent, scales and unquantised rope part together, in bytes a token (vLLM's mla_attention).
_PACKED_MLA = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
# Two fp32 scales for each head of each token (vLLM's triton_attn).
_SCALES = 8


def token_bytes(layer: Layer, kv_dtype: str = "auto", tp: int = 1) -> int:
    """Bytes that a token takes in this layer on one GPU, index caches left out; 0 for a state."""
    if kv_dtype not in KV_DTYPES:
        raise UnknownGeometry(
            f"the KV cache type {kv_dtype!r} is not known: use one of {', '.join(KV_DTYPES)}"
        )
    if layer.kind is Kind.STATE:
        return 0
    if layer.kind is Kind.MLA:
        # A sparse MLA model with an fp8 cache always uses the packed form.
        if kv_dtype.startswith("fp8") and layer.indexer_bytes:
            kv_dtype = "fp8_ds_mla"
        if kv_dtype in _PACKED_MLA:
            return _PACKED_MLA[kv_dtype]
    elif kv_dtype in _PACKED_MLA:
        raise UnknownGeometry(f"the KV cache type {kv_dtype!r} is for MLA models only")
    heads = -(-layer.kv_heads // tp) if layer.kind is not Kind.MLA else 1
    if kv_dtype == "nvfp4":
        return heads * sum(dim // 2 + dim // 16 for dim in (layer.k_dim, layer.v_dim))
    bits = heads * (layer.k_dim + layer.v_dim) * _BITS[kv_dtype]
    scales = heads * _SCALES if kv_dtype.endswith("per_token_head") else 0
    return -(-bits // 8) + scales


def state_bytes(layer: Layer, tp: int = 1, draft_tokens: int = 0, model_bytes: int = 2) -> int:
    """Bytes of a layer's state for one sequence on one GPU; 0 for a layer without one."""
    state = layer.state
    if state is None:
        return 0
    # A rank needs at least one group, so groups are repeated where they do not divide evenly.
    groups = state.groups + (tp - state.groups if state.groups and state.groups % tp else 0)
    groups = max(groups, state.groups)
    channels = -(-(state.conv_width + 2 * groups * state.group_width) // tp)
    rows = state.conv_rows + draft_tokens if state.conv_rows else 0
    return rows * channels * model_bytes + -(-state.ssm // tp) * (state.ssm_bytes or model_bytes)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on one GPU, whole model. Token figures grow with each token that the kind still keeps.

    `sliding_bytes_per_token` holds for tokens inside the window or the chunk only;
    `cross_bytes_per_token` for the encoder's tokens; `indexer_bytes_per_token` comes on top of
    `full_attention_bytes_per_token`.
    """

    full_attention_bytes_per_token: int
    indexer_bytes_per_token: int
    sliding_bytes_per_token: int
    cross_bytes_per_token: int
    state_bytes_per_sequence: int


def footprint(
    geometry: ModelGeometry, kv_dtype: str = "auto", tp: int = 1, with_drafts: bool = False
) -> Footprint:
    """Bytes per token by kind of layer, and per sequence for states."""
    layers = (*geometry.layers, *(geometry.draft_layers if with_drafts else ()))

    def of(*kinds: Kind) -> int:
        return sum(token_bytes(layer, kv_dtype, tp) for layer in layers if layer.kind in kinds)

    return Footprint(
        full_attention_bytes_per_token=of(Kind.FULL, Kind.MLA),
        indexer_bytes_per_token=sum(layer.indexer_bytes for layer in layers),
        sliding_bytes_per_token=of(Kind.SLIDING, Kind.CHUNKED),
        cross_bytes_per_token=of(Kind.CROSS),
        state_bytes_per_sequence=sum(state_bytes(layer, tp) for layer in layers),
    )
