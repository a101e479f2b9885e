"""The figures of `kvgate plan`, ready for JSON: bytes of a model, and what a pool holds at once.

Promise: a pool is asked for what it holds and never second-guessed, whether it was worked out from
hardware or read from an engine that runs.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Protocol, TypeAlias

from kvgate.core.geometry import Serving, footprint
from kvgate.core.geometry.capacity import Held
from kvgate.core.geometry.layers import Kind, ModelGeometry
from kvgate.core.geometry.layout import KVLayout

ShapeOf: TypeAlias = tuple[int, int | None]
"""Prompt tokens and output cap; None: no cap is set."""

# Shown where no --shape is given: a chat, a document, a long document.
SHAPES: tuple[ShapeOf, ...] = ((1000, 500), (4000, 1000), (16000, 2000))
FRACTIONS = (0.80, 0.90, 1.00)
_CAPS = (256, 1024, 4096, 16384)
_SMALL_CAPS = (16, 32, 64, 128, 256, 512, 1024)


class Pool(Protocol):
    """What is planned for: `core.geometry.capacity.Capacity`, or an engine that runs."""

    @property
    def total_blocks(self) -> int: ...
    @property
    def context(self) -> int: ...

    def usable(self, safety_fraction: float) -> int: ...
    def holds(self, prompt_tokens: int, output_cap: int | None, safety_fraction: float) -> Held: ...


def shapes_within(context: int) -> tuple[ShapeOf, ...]:
    """Shapes to show for a context where none are asked for."""
    fit = tuple(shape for shape in SHAPES if shape[0] < context)
    part = max(1, context // 8)
    # Small contexts are those of small engines: a shape each of a little, much, and no cap.
    return fit or ((part, part), (2 * part, 2 * part), (2 * part, None))


def model_figures(geometry: ModelGeometry, serving: Serving) -> dict[str, Any]:
    """What a model's configuration says by itself."""
    return {
        "model_type": geometry.model_type,
        "layers": {str(kind): geometry.count(kind) for kind in Kind if geometry.count(kind)},
        "kv_shared_layers": geometry.shared_layers,
        "kv_dtype": serving.kv_dtype,
        "tp": serving.tp,
        "pp": serving.pp,
        **asdict(footprint(geometry, serving.kv_dtype, serving.tp)),
        "notes": list(geometry.notes),
    }


def layout_figures(layout: KVLayout) -> dict[str, Any]:
    """How a sequence takes blocks."""
    return {
        "groups": [asdict(group) | {"kind": str(group.kind)} for group in layout.groups],
        "block_size": layout.block_size,
        "bytes_per_block": layout.bytes_per_block,
        "reserve_blocks": layout.reserve_blocks,
    }


def pool_figures(pool: Pool, shapes: tuple[ShapeOf, ...], safety_fraction: float) -> dict[str, Any]:
    """What the pool holds at once: for the shapes, for other caps, for other fractions."""
    prompts = dict.fromkeys(shape[0] for shape in shapes)
    return {
        "total_blocks": pool.total_blocks,
        "usable_blocks": pool.usable(safety_fraction),
        "safety_fraction": safety_fraction,
        "context": pool.context,
        "shapes": held(pool, shapes, safety_fraction),
        "caps": held(
            pool,
            tuple((p, cap) for p in prompts for cap in (*_caps(pool.context - p), None)),
            safety_fraction,
        ),
        "safety_fractions": [
            {"safety_fraction": fraction, "concurrent": pool.holds(*shape, fraction).concurrent}
            | {"prompt_tokens": shape[0], "output_cap": shape[1]}
            for shape in shapes
            for fraction in sorted({*FRACTIONS, safety_fraction})
        ],
    }


def held(pool: Pool, shapes: tuple[ShapeOf, ...], safety_fraction: float) -> list[dict[str, Any]]:
    """How many of each shape fit."""
    return [
        asdict(pool.holds(*shape, safety_fraction)) | {"cap_set": shape[1] is not None} for shape in shapes
    ]


def _caps(rest: int) -> tuple[int, ...]:
    caps = tuple(cap for cap in _CAPS if cap < rest)
    return caps if len(caps) > 1 else tuple(cap for cap in _SMALL_CAPS if cap < rest)[-3:]
