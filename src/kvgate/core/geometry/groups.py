"""Layers -> the groups in which vLLM allocates them, and the bytes of one block.

Every sequence takes blocks from every group, all out of one pool, so the groups decide the price.
Promise: the rules are those of vLLM's kv_cache_planning (0.32 and 0.33, layers outermost): one group
where all layers need the same tokens, else one page size for all and groups of equal layer count.
What cannot be unified raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvgate.core.geometry.fields import unknown
from kvgate.core.geometry.layers import Kind, Layer, ModelGeometry
from kvgate.core.geometry.pages import state_bytes, token_bytes
from kvgate.core.geometry.serving import Serving

_WHOLE = (Kind.FULL, Kind.MLA)
_LOCAL = (Kind.SLIDING, Kind.CHUNKED)
# MLA kernels of hybrid models want blocks of this many tokens (vLLM's platform interface).
_MLA_HYBRID_BLOCK = 128
# Above this ratio between the largest and the smallest kind, groups are as small as the smallest.
_PAD_RATIO = 1.5


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share one block table. `block_size`: tokens that one block spans for a sequence;
    `checkpoints`: states beside the running ones that a prefill may write."""

    kind: Kind
    block_size: int
    window: int = 0
    layers: int = 1
    checkpoints: int = 0


@dataclass(frozen=True, slots=True)
class Spec:
    """One layer as the allocator sees it: two layers with equal specs may share a block table."""

    kind: Kind
    shape: tuple[int, int, int]
    window: int
    block_size: int
    page: int
    index: int = 0
    checkpoints: int = 0

    @property
    def key(self) -> Spec:
        return replace(self, index=0)


def form_groups(geometry: ModelGeometry, serving: Serving) -> tuple[tuple[Group, ...], int]:
    """The groups, and the bytes that one block takes on the fullest GPU."""
    layers = (*geometry.layers, *(geometry.draft_layers if serving.model_drafter else ()))
    if not layers:
        raise unknown(f"{geometry.model_type} keeps nothing for a sequence, so there is nothing to price")
    specs = _specs(layers, serving)
    gathered = [specs] if _need_same_tokens(specs) else _split(_one_page(specs))
    groups = tuple(_group(members, serving) for members in gathered)
    return groups, max(_stage_bytes(gathered, geometry.model_layers, serving.pp))


def _specs(layers: Sequence[Layer], serving: Serving) -> list[Spec]:
    block, state_page = _hybrid_block(layers, serving)
    specs = []
    for layer in layers:
        kind = layer.kind if serving.hybrid_manager or layer.kind not in _LOCAL else Kind.FULL
        if layer.state is not None:
            size = max(state_bytes(layer, serving.tp, serving.draft_tokens), state_page)
            specs.append(Spec(kind, (0, 0, 0), 0, block, size, layer.index, layer.state.checkpoints))
            continue
        token = token_bytes(layer, serving.kv_dtype, serving.tp) + layer.indexer_bytes
        window = layer.window if kind in _LOCAL else 0
        shape = (layer.kv_heads, layer.k_dim, layer.v_dim)
        specs.append(Spec(kind, shape, window, block, block * token, layer.index))
    return specs


def _hybrid_block(layers: Sequence[Layer], serving: Serving) -> tuple[int, int]:
    """Block size, and the size to which states are padded: attention's page is the larger one."""
    states = [state_bytes(layer, serving.tp, serving.draft_tokens) for layer in layers if layer.state]
    attention = [layer for layer in layers if layer.kind in (*_WHOLE, *_LOCAL)]
    if not states or not attention:
        return serving.block_size, 0
    first = next((layer for layer in attention if layer.kind in _WHOLE), attention[0])
    token = token_bytes(first, serving.kv_dtype, serving.tp)
    step = max(serving.block_size, _MLA_HYBRID_BLOCK if first.kind is Kind.MLA else 1)
    block = max(serving.block_size, step * -(-max(states) // (step * token)))
    return block, block * token


def _need_same_tokens(specs: Sequence[Spec]) -> bool:
    """True where all layers need the same slots, whatever their sizes: one group for all."""
    kinds = {spec.kind for spec in specs}
    if kinds <= set(_WHOLE):
        return True
    if len(kinds) > 1:
        return False
    if kinds == {Kind.STATE}:
        return len({spec.page for spec in specs}) == 1
    return len({spec.window for spec in specs}) == 1


def _one_page(specs: list[Spec]) -> list[Spec]:
    """The same layers with one page size: longer blocks where that divides, padding elsewhere."""
    largest = max(spec.page for spec in specs)
    unified = []
    for spec in specs:
        if spec.page == largest:
            unified.append(spec)
        elif spec.kind is Kind.STATE:
            unified.append(replace(spec, page=largest))
        elif largest % spec.page == 0:
            unified.append(replace(spec, block_size=spec.block_size * (largest // spec.page), page=largest))
        elif spec.kind is not Kind.MLA:
            unified.append(replace(spec, page=largest))
        elif any(other.kind is Kind.SLIDING for other in specs) and not any(
            s.kind is Kind.STATE for s in specs
        ):
            # A latent cannot be padded: vLLM then keeps the windows whole, in one group with it.
            return [replace(s, kind=Kind.MLA, window=0, block_size=spec.block_size) for s in specs]
        else:
            raise unknown("an MLA layer's page does not divide the page of the layers beside it")
    return unified


def _split(specs: list[Spec]) -> list[list[Spec]]:
    """Groups of equal layer count, each of one kind; the last ones may be short."""
    if _need_same_tokens(specs):
        return [specs]
    buckets: dict[Spec, list[Spec]] = {}
    for spec in specs:
        buckets.setdefault(spec.key, []).append(spec)
    counts = [len(bucket) for bucket in buckets.values()]
    size = max(counts) if max(counts) < min(counts) * _PAD_RATIO else min(counts)
    gathered: list[list[Spec]] = []
    for bucket in buckets.values():
        number = -(-len(bucket) // size)
        gathered.extend(bucket[start::number] for start in range(number))
    return gathered


def _group(members: list[Spec], serving: Serving) -> Group:
    first = members[0]
    if serving.dcp > 1 and first.kind in _LOCAL:
        raise unknown("decode context parallelism is not supported for sliding-window or chunked layers")
    spans = first.block_size * (serving.dcp if first.kind in _WHOLE else 1)
    return Group(first.kind, spans, first.window, len(members), first.checkpoints)


def _stage_bytes(gathered: list[list[Spec]], model_layers: int, pp: int) -> list[int]:
    """Bytes a block on each pipeline stage: the largest group's pages there."""
    ends = stage_ends(model_layers, pp)
    sizes = []
    for stage, end in enumerate(ends):
        start = ends[stage - 1] if stage else 0
        # Draft layers follow the last one and live on the last stage.
        last = stage == len(ends) - 1
        sizes.append(
            max(
                sum(
                    spec.page for spec in members if start <= spec.index < end or (last and spec.index >= end)
                )
                for members in gathered
            )
        )
    return sizes


def stage_ends(model_layers: int, pp: int) -> list[int]:
    """Where each pipeline stage ends: equal parts, the rest to the stages before the last one."""
    if pp > model_layers:
        raise unknown(f"{pp} pipeline stages are more than the model's {model_layers} layers")
    sizes = [model_layers // pp] * pp
    for extra in range(model_layers % pp):
        sizes[-(extra + 2)] += 1
    return [sum(sizes[: i + 1]) for i in range(pp)]
