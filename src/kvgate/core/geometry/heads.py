"""How many KV heads a layer has and how wide they are, under the many names for both.

Promise: `head_dim` wins over hidden/heads, an MLA model's head count is never read, and a missing
number raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvgate.core.geometry.fields import Fields, unknown
from kvgate.core.geometry.layers import Kind, Layer


@dataclass(frozen=True, slots=True)
class Heads:
    """KV heads of one layer and the widths of K and V; an index beside them, in bytes a token."""

    kv_heads: int
    k_dim: int
    v_dim: int
    indexer_bytes: int = 0

    def layer(self, kind: Kind, index: int, window: int = 0) -> Layer:
        return Layer(kind, index, self.kv_heads, self.k_dim, self.v_dim, window, self.indexer_bytes)


def _query_heads(fields: Fields) -> int:
    return fields.need("num_attention_heads", "n_head", "n_heads")


def _kv_heads(fields: Fields) -> int:
    kind = fields.model_type
    if kind == "falcon":
        # The new decoder names its KV heads; the old one has one for all queries, or one for each.
        if fields.config.get("new_decoder_architecture"):
            return fields.maybe("num_kv_heads", "n_head_kv") or _query_heads(fields)
        return 1 if fields.config.get("multi_query", True) else _query_heads(fields)
    if kind == "gpt_bigcode":
        return 1 if fields.config.get("multi_query", True) else _query_heads(fields)
    if kind == "dbrx":
        return fields.inner("attn_config").need("kv_n_heads")
    if kind == "mpt":
        return fields.inner("attn_config").maybe("kv_n_heads") or _query_heads(fields)
    if kind in ("chatglm", "glm_legacy"):
        grouped = fields.config.get("multi_query_attention")
        return fields.need("multi_query_group_num") if grouped else _query_heads(fields)
    # Where a family never had grouped queries the field is missing, and K and V are as many as Q.
    return fields.maybe("num_key_value_heads", "num_kv_heads", "n_head_kv") or _query_heads(fields)


def _head_dim(fields: Fields) -> int:
    given = fields.maybe("head_dim", "attention_head_dim", "kv_channels", "hidden_size_per_head")
    if fields.model_type == "zamba2":
        given = fields.need("attention_head_dim")
    return given or fields.need("hidden_size", "n_embd", "d_model") // _query_heads(fields)


def heads_for(fields: Fields, sliding: bool = False) -> Heads:
    """The heads of a full-attention layer, or of a sliding one where the two differ."""
    kind = fields.model_type
    if kind == "mimo_v2_flash":
        prefix = "swa_" if sliding else ""
        names = (f"{prefix}num_key_value_heads", f"{prefix}head_dim", f"{prefix}v_head_dim")
        return Heads(fields.need(names[0]), fields.need(names[1]), fields.need(names[2]))
    kv_heads, dim = _kv_heads(fields), _head_dim(fields)
    if kind in ("gemma4", "gemma4_text") and not sliding:
        kv_heads = fields.maybe("num_global_key_value_heads") or kv_heads
        dim = fields.maybe("global_head_dim") or dim
    return Heads(kv_heads, dim, dim)


def mla_heads(fields: Fields) -> Heads:
    """One latent for all heads; a sparse index (DSA) keeps one fp8 key a token and its scales."""
    index = fields.maybe("index_head_dim")
    # One byte an element and a four-byte scale for each 128 of them.
    extra = index + index // 128 * 4 if index else 0
    return Heads(1, fields.need("kv_lora_rank") + fields.need("qk_rope_head_dim"), 0, extra)


def nas_heads(fields: Fields) -> list[Heads | None]:
    """One entry a layer, None where the layer has no attention (`block_configs`)."""
    query, found = _query_heads(fields), list[Heads | None]()
    dim = _head_dim(fields)
    for number, block in enumerate(fields.names("block_configs") or []):
        attention = block.get("attention") if isinstance(block, Mapping) else None
        if not isinstance(attention, Mapping):
            raise unknown(f"block_configs[{number}] does not say its attention")
        if attention.get("no_op") or attention.get("replace_with_linear"):
            found.append(None)
            continue
        group = attention.get("n_heads_in_group")
        if not isinstance(group, int) or group < 1:
            raise unknown(f"block_configs[{number}].attention does not say n_heads_in_group")
        found.append(Heads(query // group, dim, dim))
    return found
