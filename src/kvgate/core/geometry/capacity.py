"""How many blocks a GPU's memory makes, and how many requests of a shape they hold.

Promise: the arithmetic of vLLM's start-up without its measurement: what the engine finds taken by
activations, graphs and other programs is the caller's `other_bytes`, never guessed here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvgate.core.geometry.layers import ModelGeometry, UnknownGeometry
from kvgate.core.geometry.layout import KVLayout, layout_for
from kvgate.core.geometry.serving import Serving


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU's memory, and the share of it that the engine may take (vLLM's gpu-memory-utilization).

    `weights_bytes`: of the whole model; `other_bytes`: activations and the rest, on each GPU.
    """

    memory_bytes: int
    utilization: float = 0.9
    weights_bytes: int = 0
    other_bytes: int = 0

    def kv_bytes(self, serving: Serving) -> int:
        """Bytes left for KV on each GPU. Raises `UnknownGeometry` where nothing is left."""
        weights = -(-self.weights_bytes // (serving.tp * serving.pp))
        left = int(self.memory_bytes * self.utilization) - weights - self.other_bytes
        if left <= 0:
            raise UnknownGeometry(
                f"no memory is left for KV: {self.memory_bytes * self.utilization / 2**30:.1f} GiB of each "
                f"GPU may be used and the weights take {weights / 2**30:.1f} GiB of it. Use more GPUs (--tp, "
                "--pp), larger ones, or smaller weights"
            )
        return left


@dataclass(frozen=True, slots=True)
class Held:
    """Requests of one shape on a pool: blocks each, and how many fit together."""

    prompt_tokens: int
    output_cap: int
    blocks: int
    final_blocks: int
    concurrent: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """A pool of `total_blocks` (the engine's null block left out), priced by `layout`."""

    layout: KVLayout
    total_blocks: int
    context: int

    def usable(self, safety_fraction: float) -> int:
        """Blocks that may be reserved, after what the layout keeps back."""
        usable = int(self.total_blocks * safety_fraction + 1e-9)
        return max(0, usable - self.layout.reserve_blocks)

    def holds(self, prompt_tokens: int, output_cap: int | None, safety_fraction: float) -> Held:
        """How many requests of this shape fit; an unset cap is the rest of the context."""
        rest = self.context - prompt_tokens
        if rest < 1:
            raise UnknownGeometry(
                f"a prompt of {prompt_tokens:,} tokens fills the context of {self.context:,}: nothing can be "
                "generated"
            )
        cap = rest if output_cap is None else min(output_cap, rest)
        blocks = self.layout.blocks(prompt_tokens, cap, self.context)
        fit = self.usable(safety_fraction) // blocks.peak
        return Held(prompt_tokens, cap, blocks.peak, blocks.final, fit)


def capacity(
    geometry: ModelGeometry,
    serving: Serving,
    kv_bytes: int,
    context: int | None,
    shapes: Sequence[tuple[int, int | None]] = (),
) -> Capacity:
    """The pool that `kv_bytes` on each GPU make. `context` defaults to the model's own.

    Tokens in flight are kept back once for all where that holds more requests of `shapes`, else
    charged to each request: both are safe.
    """
    context = context or geometry.context
    if context is None:
        raise UnknownGeometry("the model configuration does not say its context: give it (--context)")
    each, once = layout_for(geometry, serving), layout_for(geometry, serving, shared_transient=True)
    # One block is the engine's null block and never given to a request.
    total = kv_bytes // each.bytes_per_block - 1
    if total < 1:
        raise UnknownGeometry(
            f"{kv_bytes / 2**30:.2f} GiB for KV is less than two blocks of {each.bytes_per_block:,} bytes"
        )
    charged, kept = (Capacity(layout, total, context) for layout in (each, once))
    return kept if _held(kept, shapes) > _held(charged, shapes) else charged


def _held(pool: Capacity, shapes: Sequence[tuple[int, int | None]]) -> int:
    return math.prod(pool.holds(*shape, 1.0).concurrent for shape in shapes)
