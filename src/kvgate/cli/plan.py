"""`kvgate plan`: what a model's KV cache comes to on given hardware, before anything is started.

All figures follow from the model's config.json and the options; nothing runs, and only the engine that
--upstream names is asked. What cannot be told is an error that says what to give.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import click
from rich.console import Console

from kvgate.cli.addresses import EngineUrl
from kvgate.cli.plan_upstream import pool_at
from kvgate.cli.plan_view import show
from kvgate.core.geometry import KV_DTYPES, Serving, UnknownGeometry, footprint, from_config
from kvgate.core.geometry.capacity import Capacity, Hardware, capacity
from kvgate.core.geometry.layers import Kind, ModelGeometry

_UNITS = {
    "": 2**30,
    "g": 2**30,
    "gib": 2**30,
    "gb": 10**9,
    "m": 2**20,
    "mib": 2**20,
    "mb": 10**6,
    "tib": 2**40,
}
# Shown where no --shape is given: a chat, a document, a long document.
_SHAPES: tuple[tuple[int, int | None], ...] = ((1000, 500), (4000, 1000), (16000, 2000))
FRACTIONS = (0.80, 0.90, 1.00)
_CAPS = (256, 1024, 4096, 16384)


class Size(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A size of memory: 80GiB, 24GB; a bare number is GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(value))
        unit = _UNITS.get(found[2].lower()) if found else None
        if found is None or unit is None or float(found[1]) == 0:
            self.fail(f"{value!r} is not a size of memory; write 80GiB or 24GB", param, ctx)
        return int(float(found[1]) * unit)


class Shape(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """PROMPT:CAP in tokens; the cap may be `unset`."""

    name = "prompt:cap"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int | None]:
        if isinstance(value, tuple):
            return value
        found = re.fullmatch(r"(\d+):(\d+|unset)", str(value))
        if found is None or found[2] == "0":
            self.fail(f"{value!r} is not PROMPT:CAP; write 2000:500, or 2000:unset for no cap", param, ctx)
        return int(found[1]), None if found[2] == "unset" else int(found[2])


@dataclass(frozen=True)
class Plan:
    """Everything that is shown: the figures by name, and the pool where hardware was given."""

    figures: dict[str, Any]
    pool: Capacity | None
    shapes: tuple[tuple[int, int | None], ...]
    safety_fraction: float


@click.command()
@click.option(
    "--model-config",
    required=True,
    type=click.File("rb"),
    metavar="FILE",
    help="The model's config.json; - reads it.",
)
@click.option("--upstream", type=EngineUrl(), metavar="URL", help="A vLLM that runs: its blocks and context.")
@click.option("--gpu-memory", type=Size(), help="Memory of one GPU: 80GiB, 24GB. Without it, no blocks.")
@click.option("--tp", default=1, show_default=True, type=click.IntRange(1), help="Tensor-parallel GPUs.")
@click.option("--pp", default=1, show_default=True, type=click.IntRange(1), help="Pipeline stages.")
@click.option(
    "--weights-gib", default=0.0, type=click.FloatRange(0), help="Weights of the whole model, in GiB."
)
@click.option(
    "--other-gib",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0),
    help="Activations and the rest, a GPU.",
)
@click.option(
    "--gpu-memory-utilization",
    default=0.9,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    help="The engine's own option.",
)
@click.option("--block-size", default=16, show_default=True, type=click.IntRange(1), help="Tokens a block.")
@click.option(
    "--kv-dtype",
    default="auto",
    show_default=True,
    type=click.Choice(KV_DTYPES),
    help="Type of the KV cache.",
)
@click.option("--max-num-batched-tokens", default=8192, show_default=True, type=click.IntRange(1))
@click.option("--context", type=click.IntRange(1), help="Tokens of a sequence. Default: the model's own.")
@click.option(
    "--encoder-tokens", type=click.IntRange(1), help="Image or audio tokens that cross attention keeps."
)
@click.option(
    "--safety-fraction", default=0.90, show_default=True, type=click.FloatRange(0, 1, min_open=True)
)
@click.option(
    "--shape", "shapes", type=Shape(), multiple=True, metavar="PROMPT:CAP", help="A request; repeatable."
)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Draw a chart.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def plan(
    model_config: BinaryIO,
    upstream: str | None,
    gpu_memory: int | None,
    weights_gib: float,
    other_gib: float,
    gpu_memory_utilization: float,
    context: int | None,
    safety_fraction: float,
    shapes: tuple[tuple[int, int | None], ...],
    plot: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Show what a model's KV cache costs, and how many requests a GPU holds at once.

    Bytes are for one GPU, bf16 unless --kv-dtype says otherwise. Exit status: 0, or 2 where the
    configuration does not tell what is needed.

    \b
    Examples:
      kvgate plan --model-config config.json
      kvgate plan --model-config config.json --gpu-memory 80GiB --tp 2 --weights-gib 65 \\
        --shape 2000:500 --shape 2000:unset --plot plan.png
      kvgate plan --model-config config.json --upstream http://127.0.0.1:8000
    """
    try:
        config = _read(model_config)
        geometry = from_config(config)
        serving = _serving(options)
        pool = None
        if upstream is not None:
            pool = pool_at(upstream, config, serving, safety_fraction)
            shapes = shapes or tuple(shape for shape in _SHAPES if shape[0] < pool.context)
        elif gpu_memory is not None:
            hardware = Hardware(
                gpu_memory, gpu_memory_utilization, int(weights_gib * 2**30), int(other_gib * 2**30)
            )
            known = context or geometry.context or 0
            shapes = shapes or tuple(shape for shape in _SHAPES if shape[0] < known)
            pool = capacity(geometry, serving, hardware.kv_bytes(serving), context, shapes)
        elif plot is not None:
            raise click.UsageError("--plot draws concurrency, which needs --gpu-memory or --upstream")
        made = make(geometry, serving, pool, shapes, safety_fraction)
    except UnknownGeometry as unknown:
        raise click.UsageError(str(unknown)) from None
    if plot is not None and pool is not None:
        _draw(plot, made)
    if as_json:
        click.echo(json.dumps(made.figures, indent=2))
        return
    # Piped output is read by tools and logs, where a width guessed as 80 would fold the tables.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    show(console, made.figures)


def make(
    geometry: ModelGeometry,
    serving: Serving,
    pool: Capacity | None,
    shapes: tuple[tuple[int, int | None], ...],
    safety_fraction: float,
) -> Plan:
    """The figures of a plan, ready for JSON."""
    figures: dict[str, Any] = {
        "model_type": geometry.model_type,
        "layers": {str(kind): geometry.count(kind) for kind in Kind if geometry.count(kind)},
        "kv_shared_layers": geometry.shared_layers,
        "kv_dtype": serving.kv_dtype,
        "tp": serving.tp,
        "pp": serving.pp,
        **asdict(footprint(geometry, serving.kv_dtype, serving.tp)),
        "notes": list(geometry.notes),
    }
    if pool is None:
        return Plan(figures, None, (), safety_fraction)
    layout = pool.layout
    figures |= {
        "groups": [asdict(group) | {"kind": str(group.kind)} for group in layout.groups],
        "block_size": layout.block_size,
        "bytes_per_block": layout.bytes_per_block,
        "total_blocks": pool.total_blocks,
        "usable_blocks": pool.usable(safety_fraction),
        "reserve_blocks": layout.reserve_blocks,
        "safety_fraction": safety_fraction,
        "context": pool.context,
        "shapes": [
            asdict(pool.holds(*shape, safety_fraction)) | {"cap_set": shape[1] is not None}
            for shape in shapes
        ],
        "caps": [
            asdict(pool.holds(prompt, cap, safety_fraction)) | {"cap_set": cap is not None}
            for prompt in dict.fromkeys(shape[0] for shape in shapes)
            for cap in (*(c for c in _CAPS if c < pool.context - prompt), None)
        ],
        "safety_fractions": [
            {"safety_fraction": fraction, "concurrent": pool.holds(*shape, fraction).concurrent}
            | {"prompt_tokens": shape[0], "output_cap": shape[1]}
            for shape in shapes
            for fraction in sorted({*FRACTIONS, safety_fraction})
        ],
    }
    return Plan(figures, pool, shapes, safety_fraction)


def _read(source: BinaryIO) -> dict[str, Any]:
    try:
        config = json.loads(source.read())
    except ValueError as wrong:
        raise UnknownGeometry(f"the model configuration is not JSON: {wrong}") from None
    if not isinstance(config, dict):
        raise UnknownGeometry("the model configuration holds no JSON object")
    return config


def _serving(options: dict[str, Any]) -> Serving:
    return Serving(
        block_size=options["block_size"],
        kv_dtype=options["kv_dtype"],
        tp=options["tp"],
        pp=options["pp"],
        max_batched_tokens=options["max_num_batched_tokens"],
        encoder_tokens=options["encoder_tokens"],
    )


def _draw(path: Path, made: Plan) -> None:
    try:
        from kvgate.cli.plan_chart import draw
    except ImportError:
        raise click.ClickException("--plot needs matplotlib: pip install 'kvgate[plot]'") from None
    assert made.pool is not None
    try:
        draw(path, made.pool, tuple(dict.fromkeys(shape[0] for shape in made.shapes)), made.safety_fraction)
    except (OSError, ValueError) as failed:
        raise click.ClickException(f"the chart could not be written to {path}: {failed}") from None
