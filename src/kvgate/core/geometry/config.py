"""A Hugging Face `config.json` -> the model's geometry.

Promise: a model is read only if its family is known here, with that family's own rules; anything
else raises `UnknownGeometry` and says how to give the engine's figures instead. Fields that mislead
(the head count of an MLA model, hidden/heads beside `head_dim`) are not read.
"""

from __future__ import annotations

from collections.abc import Callable

from kvgate.core.geometry import states
from kvgate.core.geometry.fields import Config, Fields, unknown
from kvgate.core.geometry.heads import Heads, heads_for, mla_heads, nas_heads
from kvgate.core.geometry.kinds import Part, parts, window_of
from kvgate.core.geometry.known import ENCODER_DECODER, MLA, PLAIN, STATES
from kvgate.core.geometry.layers import Kind, Layer, ModelGeometry, State

_STATE: dict[str, Callable[[Fields], State]] = {
    "gdn": states.gated_delta_net,
    "kda": states.kimi_delta,
    "mamba2": states.mamba2,
    "mamba1": states.mamba1,
    "lightning": states.lightning,
    "conv": states.short_conv,
    "rg_lru": states.rg_lru,
    "rwkv": states.rwkv,
}
_KINDS = {Part.FULL: Kind.FULL, Part.SLIDING: Kind.SLIDING, Part.CHUNKED: Kind.CHUNKED}


def from_config(config: Config) -> ModelGeometry:
    """The geometry of the model that this `config.json` describes.

    Raises `UnknownGeometry` for an unknown family and for a configuration that lacks a fact; the
    message names what is missing.
    """
    fields = Fields(config)
    family = _family(fields)
    if fields.get("block_configs") is not None:
        return _nas(fields)
    if family in ENCODER_DECODER:
        return _encoder_decoder(fields)
    if family in MLA and fields.maybe("kv_lora_rank") is None:
        raise unknown(f"the model configuration ({family}) does not say kv_lora_rank")
    found = parts(fields)
    shared = fields.maybe("num_kv_shared_layers") or 0
    layers: list[Layer] = []
    for index, part in enumerate(found[: len(found) - shared]):
        layers.extend(_layers(fields, index, part))
    return ModelGeometry(
        model_type=family,
        layers=tuple(layers),
        model_layers=len(found),
        draft_layers=_draft(fields, layers, len(found)),
        shared_layers=shared,
        context=_context(fields),
        encoder_tokens=None,
        notes=_notes(fields),
    )


def _family(fields: Fields) -> str:
    """The model type that decides the rules: the text model's, or the whole model's."""
    known = PLAIN | MLA | ENCODER_DECODER | STATES.keys()
    outer = str(fields.outer.get("model_type") or "")
    if fields.get("compress_ratios") is not None:
        raise unknown(
            f"{outer or 'this model'} keeps compressed KV (compress_ratios), whose size no formula here gives"
        )
    for name in (fields.model_type, outer):
        if name in known:
            fields.model_type = name
            return name
    named = fields.model_type or outer
    raise unknown(
        f"the model type {named!r} is not known to kvgate, so its layers and KV heads cannot be told"
        if named
        else "the model configuration has no model_type, so its layers and KV heads cannot be told"
    )


def _layers(fields: Fields, index: int, part: Part) -> list[Layer]:
    """What one model layer keeps: nothing, one store, or attention and a state, or two attentions."""
    if part is Part.NOTHING:
        return []
    if part is Part.CROSS:
        heads = heads_for(fields)
        return [Layer(Kind.CROSS, index, heads.kv_heads, heads.k_dim, heads.v_dim)]
    state: list[Layer] = []
    if part in (Part.STATE, Part.BOTH):
        name = STATES.get(fields.model_type)
        if name is None:
            raise unknown(f"{fields.model_type} has state layers whose size is not known")
        state = [Layer(Kind.STATE, index, state=_STATE[name](fields))]
    if part is Part.STATE:
        return state
    return [*_attention(fields, index, Part.FULL if part is Part.BOTH else part), *state]


def _attention(fields: Fields, index: int, part: Part) -> list[Layer]:
    if fields.maybe("kv_lora_rank") is not None and part is Part.FULL:
        latent = mla_heads(fields)
        # LongCat has two attentions in each of its layers.
        return [latent.layer(Kind.MLA, index)] * (2 if fields.model_type == "longcat_flash" else 1)
    heads = heads_for(fields, sliding=part is Part.SLIDING)
    window = 0
    if part is Part.SLIDING:
        window = window_of(fields) or fields.need("sliding_window")
    elif part is Part.CHUNKED:
        window = fields.need("attention_chunk_size")
    return [heads.layer(_KINDS[part], index, window)]


def _draft(fields: Fields, layers: list[Layer], count: int) -> tuple[Layer, ...]:
    """Layers of the built-in speculative head: as the model's own last full-attention layer."""
    drafts = fields.maybe("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules") or 0
    full = [layer for layer in layers if layer.kind in (Kind.FULL, Kind.MLA)]
    if not drafts or not full:
        return ()
    last = full[-1]
    return tuple(
        Layer(last.kind, count + i, last.kv_heads, last.k_dim, last.v_dim, 0, last.indexer_bytes)
        for i in range(drafts)
    )


def _context(fields: Fields) -> int | None:
    return fields.maybe(
        "max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions", "context_length"
    )


def _notes(fields: Fields) -> tuple[str, ...]:
    if fields.get("sparse_attention_config") is not None:
        return ("The sparse-attention index is not counted: bytes a token are a lower bound.",)
    return ()


def _nas(fields: Fields) -> ModelGeometry:
    """Nemotron-NAS (DeciLM): each layer has its own number of heads, or no attention at all."""
    per_layer = nas_heads(fields)
    layers = [heads.layer(Kind.FULL, i) for i, heads in enumerate(per_layer) if isinstance(heads, Heads)]
    return ModelGeometry(
        fields.model_type, tuple(layers), model_layers=len(per_layer), context=_context(fields)
    )


def _encoder_decoder(fields: Fields) -> ModelGeometry:
    """BART, T5, Whisper: the decoder's own KV, and the encoder's tokens in every decoder layer."""
    count = fields.need("decoder_layers", "num_decoder_layers")
    query = fields.need("decoder_attention_heads", "num_heads")
    dim = fields.maybe("d_kv") or fields.need("d_model") // query
    layers = [Layer(kind, i, query, dim, dim) for i in range(count) for kind in (Kind.FULL, Kind.CROSS)]
    return ModelGeometry(
        fields.model_type,
        tuple(layers),
        model_layers=count,
        context=_context(fields),
        encoder_tokens=fields.maybe("max_source_positions", "max_position_embeddings", "n_positions"),
    )
