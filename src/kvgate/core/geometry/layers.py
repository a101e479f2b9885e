"""What one model keeps for a sequence, layer by layer.

Promise: plain facts, frozen and hashable; nothing here depends on an engine, on hardware or on how
the cache is stored. Sizes are whole-model: tensor parallelism divides them later (`pages`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class UnknownGeometry(ValueError):
    """The model's KV cache cannot be told from its configuration. The message says what to give."""


class Kind(enum.StrEnum):
    """How a layer's memory grows."""

    FULL = "full_attention"
    """Every token keeps K and V for every kv head (MHA, GQA, MQA)."""
    MLA = "mla"
    """Every token keeps one latent, the same for all heads."""
    SLIDING = "sliding_attention"
    """Only the last `window` tokens are attended; the engine frees the blocks before them."""
    CHUNKED = "chunked_attention"
    """Tokens attend inside their chunk of `window` tokens; the chunks before it are freed."""
    STATE = "state"
    """A state of fixed size a sequence: Mamba, linear attention, RG-LRU, RWKV, short convolution."""
    CROSS = "cross_attention"
    """K and V of the encoder's tokens (audio, image, source text), kept from the prefill on."""


@dataclass(frozen=True, slots=True)
class State:
    """Size of one layer's state for one sequence, in elements.

    The convolution keeps `conv_rows` rows of `conv_width + 2 x groups x group_width` channels;
    `groups` are repeated until each tensor-parallel rank has one. `ssm` elements are the recurrent
    state, kept in `ssm_bytes` a piece (None: as the model's own type). `checkpoints`: states that
    vLLM's kernel can write in the middle of a prefill, each into a block of its own.
    """

    conv_rows: int = 0
    conv_width: int = 0
    groups: int = 0
    group_width: int = 0
    ssm: int = 0
    ssm_bytes: int | None = None
    checkpoints: int = 0


@dataclass(frozen=True, slots=True)
class Layer:
    """One store of KV or state. `index`: the model layer that it belongs to (pipeline stages).

    MLA has one head of `k_dim` = latent + rope part and no V. `window`: the sliding window or the
    chunk, in tokens. `indexer_bytes`: bytes a token of a sparse-attention index, beside the KV.
    """

    kind: Kind
    index: int
    kv_heads: int = 0
    k_dim: int = 0
    v_dim: int = 0
    window: int = 0
    indexer_bytes: int = 0
    state: State | None = None


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """All that a model keeps for a sequence.

    `layers` of the model itself; `draft_layers` of its built-in speculative head, which count only
    when speculative decoding is on; `shared_layers` read another layer's KV and keep nothing.
    `context`: tokens that the configuration allows (None: it does not say). `encoder_tokens`: most
    tokens that cross attention keeps for a sequence (None: not in the configuration). `notes`: what
    these figures leave out, to be shown with them.
    """

    model_type: str
    layers: tuple[Layer, ...]
    model_layers: int
    draft_layers: tuple[Layer, ...] = ()
    shared_layers: int = 0
    context: int | None = None
    encoder_tokens: int | None = None
    notes: tuple[str, ...] = ()

    def count(self, kind: Kind) -> int:
        """Layers of this kind, draft layers left out."""
        return sum(layer.kind is kind for layer in self.layers)
