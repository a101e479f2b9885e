"""Which kind of layer stands where: a model's pattern of attention, windows, chunks and states.

Promise: the answer follows the model's own list where it has one (`layer_types` and its kin), else
the rule that its family documents; a name that is not known raises instead of counting as anything.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from kvgate.core.geometry.fields import Fields, unknown


class Part(enum.StrEnum):
    """What one model layer holds. `BOTH` is attention and a state side by side."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    STATE = "state"
    BOTH = "both"
    CROSS = "cross"
    NOTHING = "nothing"


_NAMES = {
    "full_attention": Part.FULL,
    "attention": Part.FULL,
    "global_attention": Part.FULL,
    "deepseek_sparse_attention": Part.FULL,
    "sliding_attention": Part.SLIDING,
    "sliding_window_attention": Part.SLIDING,
    "chunked_attention": Part.CHUNKED,
    "linear_attention": Part.STATE,
    "mamba": Part.STATE,
    "mamba2": Part.STATE,
    "recurrent": Part.STATE,
    "conv": Part.STATE,
    "hybrid": Part.BOTH,
    "moe": Part.NOTHING,
    "mlp": Part.NOTHING,
}
# Nemotron-H writes its layers as letters: Mamba, attention, MLP, experts.
_LETTERS = {"M": Part.STATE, "*": Part.FULL, "-": Part.NOTHING, "E": Part.NOTHING}


def named(names: list[object], field: str) -> list[Part]:
    """The parts of a list of layer names."""
    parts = []
    for name in names:
        part = _NAMES.get(str(name))
        if part is None:
            raise unknown(f"{field} has a layer of the unknown type {name!r}")
        parts.append(part)
    return parts


def letters(pattern: str) -> list[Part]:
    """The parts of a `hybrid_override_pattern`."""
    wrong = set(pattern) - set(_LETTERS)
    if wrong:
        raise unknown(f"hybrid_override_pattern has the unknown letter {min(wrong)!r}")
    return [_LETTERS[letter] for letter in pattern]


def parts(fields: Fields) -> list[Part]:
    """One part for each model layer, in order."""
    for name in ("layer_types", "layers_block_type"):
        listed = fields.names(name)
        if listed is not None:
            found = named(listed, name)
            count = fields.maybe("num_hidden_layers", "n_layers")
            if count is not None and len(found) != count:
                raise unknown(f"{name} lists {len(found)} layers and num_hidden_layers says {count}")
            return found
    count = _count(fields)
    rule = _RULES.get(fields.model_type)
    return rule(fields, count) if rule else _plain(fields, count)


def _count(fields: Fields) -> int:
    if fields.model_type == "longcat_flash":
        # Its num_hidden_layers counts attentions, two a layer.
        return fields.need("num_layers")
    pattern = fields.get("hybrid_override_pattern")
    if fields.maybe("num_hidden_layers", "n_layer", "n_layers") is None and isinstance(pattern, str):
        return len(pattern)
    return fields.need("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def window_of(fields: Fields) -> int | None:
    """The sliding window in tokens, None where there is none or it is switched off."""
    if fields.config.get("use_sliding_window") is False:
        return None
    return fields.maybe("sliding_window", "sliding_window_size", "attention_window_size")


def _plain(fields: Fields, count: int) -> list[Part]:
    """Attention everywhere; a window, where one is set, holds for all layers (Mistral, Phi-3)."""
    window, context = window_of(fields), fields.maybe("max_position_embeddings")
    # A window as long as the context never slides.
    slides = window is not None and (context is None or window < context)
    return [Part.SLIDING if slides else Part.FULL] * count


def _every(count: int, period: int, local: Part) -> list[Part]:
    return [Part.FULL if (i + 1) % period == 0 else local for i in range(count)]


def _gemma2(fields: Fields, count: int) -> list[Part]:
    return _every(count, 2, Part.SLIDING)


# Published configurations of these families leave the period out: it is their class's own.
_PERIODS = {"gemma3": 6, "gemma3_text": 6, "cohere2": 4}


def _pattern(fields: Fields, count: int) -> list[Part]:
    """Gemma 3, EXAONE 4, Cohere 2: every n-th layer is full. EXAONE writes it as `LLLG`."""
    names = ("sliding_window_pattern", "_sliding_window_pattern")
    pattern = fields.get(*names)
    if isinstance(pattern, str):
        return [Part.FULL if pattern[i % len(pattern)] == "G" else Part.SLIDING for i in range(count)]
    period = fields.maybe(*names) or _PERIODS.get(fields.model_type) or fields.need(*names)
    return _every(count, period, Part.SLIDING)


def _llama4(fields: Fields, count: int) -> list[Part]:
    """Layers without rope attend to everything: as listed, else every fourth."""
    if fields.maybe("attention_chunk_size") is None:
        return [Part.FULL] * count
    listed = fields.names("no_rope_layers")
    if listed:
        return [Part.FULL if rope == 0 else Part.CHUNKED for rope in listed]
    return _every(count, 4, Part.CHUNKED)


def _gpt_oss(fields: Fields, count: int) -> list[Part]:
    return [Part.SLIDING if i % 2 == 0 else Part.FULL for i in range(count)]


def _interval(fields: Fields, count: int) -> list[Part]:
    return _every(count, fields.need("full_attention_interval"), Part.STATE)


def _qwen2(fields: Fields, count: int) -> list[Part]:
    """With `use_sliding_window`, the layers from `max_window_layers` on slide."""
    if fields.config.get("use_sliding_window") is not True or window_of(fields) is None:
        return [Part.FULL] * count
    first = fields.maybe("max_window_layers") or 0
    return [Part.FULL if i < first else Part.SLIDING for i in range(count)]


def _mimo_v2(fields: Fields, count: int) -> list[Part]:
    listed = fields.names("hybrid_layer_pattern")
    if listed is None or len(listed) != count:
        raise unknown("hybrid_layer_pattern must have one entry for each layer")
    return [Part.SLIDING if slides else Part.FULL for slides in listed]


def _nemotron_h(fields: Fields, count: int) -> list[Part]:
    pattern = fields.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or len(pattern) != count:
        raise unknown("hybrid_override_pattern must have one letter for each layer")
    return letters(pattern)


def _jamba(fields: Fields, count: int) -> list[Part]:
    period, offset = fields.need("attn_layer_period"), fields.maybe("attn_layer_offset") or 0
    return [Part.FULL if i % period == offset else Part.STATE for i in range(count)]


def _bamba(fields: Fields, count: int) -> list[Part]:
    attention = set(fields.names("attn_layer_indices") or [])
    return [Part.FULL if i in attention else Part.STATE for i in range(count)]


def _kimi_linear(fields: Fields, count: int) -> list[Part]:
    """The lists count layers from 1."""
    linear = fields.inner("linear_attn_config")
    full, states = linear.names("full_attn_layers"), linear.names("kda_layers")
    if full is None or states is None or sorted([*full, *states]) != list(range(1, count + 1)):
        raise unknown("linear_attn_config: full_attn_layers and kda_layers must name each layer once")
    return [Part.FULL if i + 1 in set(full) else Part.STATE for i in range(count)]


def _recurrent_gemma(fields: Fields, count: int) -> list[Part]:
    """`block_types` is one period; its attention has a window."""
    period = named(fields.names("block_types") or [], "block_types")
    if not period:
        raise unknown("the model configuration (recurrent_gemma) does not say block_types")
    local = [Part.SLIDING if part is Part.FULL else part for part in period]
    return [local[i % len(local)] for i in range(count)]


def _cross(fields: Fields, count: int) -> list[Part]:
    listed = set(fields.names("cross_attention_layers") or [])
    return [Part.CROSS if i in listed else Part.FULL for i in range(count)]


def _states(fields: Fields, count: int) -> list[Part]:
    return [Part.STATE] * count


def _both(fields: Fields, count: int) -> list[Part]:
    return [Part.BOTH] * count


_RULES: dict[str, Callable[[Fields, int], list[Part]]] = {
    "gemma2": _gemma2,
    "gemma3": _pattern,
    "gemma3_text": _pattern,
    "cohere2": _pattern,
    "exaone4": _pattern,
    "llama4": _llama4,
    "llama4_text": _llama4,
    "gpt_oss": _gpt_oss,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2,
    "qwen2_vl": _qwen2,
    "qwen2_5_vl": _qwen2,
    "qwen2_5_vl_text": _qwen2,
    "qwen3": _qwen2,
    "qwen3_moe": _qwen2,
    "qwen3_next": _interval,
    "qwen3_5_text": _interval,
    "qwen3_5_moe_text": _interval,
    "mimo_v2_flash": _mimo_v2,
    "nemotron_h": _nemotron_h,
    "jamba": _jamba,
    "bamba": _bamba,
    "kimi_linear": _kimi_linear,
    "recurrent_gemma": _recurrent_gemma,
    "mllama": _cross,
    "mllama_text_model": _cross,
    "mamba": _states,
    "mamba2": _states,
    "falcon_mamba": _states,
    "rwkv": _states,
    "falcon_h1": _both,
}
