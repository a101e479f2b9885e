"""`kvgate plan`: what a model's KV cache comes to on given hardware or on an engine that runs.

All figures follow from the model's config.json, the options, and, with --upstream, from the pages of that
engine; nothing runs, and nobody else is asked. What cannot be told is named, with what to give.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import click
from rich.console import Console

from kvgate.cli.addresses import EngineUrl
from kvgate.cli.plan_figures import (
    Pool,
    ShapeOf,
    layout_figures,
    model_figures,
    pool_figures,
    shapes_within,
)
from kvgate.cli.plan_types import Shape, Size
from kvgate.cli.plan_upstream import ask, engine_figures
from kvgate.cli.plan_view import show
from kvgate.core.geometry import KV_DTYPES, Serving, UnknownGeometry, from_config
from kvgate.core.geometry.capacity import Capacity, Hardware, capacity
from kvgate.core.geometry.layers import ModelGeometry
from kvgate.edge.upstreams.access import key_from
from kvgate.edge.upstreams.discovery import Given
from kvgate.wire.engines.known import ENGINES

API_KEY = "KVGATE_API_KEY"
BLOCK_SIZE = 16
COUNT = click.IntRange(1)
SHARE = click.FloatRange(0, 1, min_open=True)
UNKNOWN = 2
ENGINE_OPTIONS = ("engine", "total_blocks", "max_seqs", "lookahead", "upstream_ca")


@click.command()
@click.option(
    "--model-config", type=click.File("rb"), metavar="FILE", help="The model's config.json; - reads it."
)
@click.option(
    "--upstream",
    type=EngineUrl(),
    metavar="URL",
    help="An engine that runs: its pool and context, instead of hardware.",
)
@click.option("--gpu-memory", type=Size(), help="Memory of one GPU: 80GiB, 24GB. Without it, no blocks.")
@click.option("--tp", default=1, show_default=True, type=COUNT, help="Tensor-parallel GPUs.")
@click.option("--pp", default=1, show_default=True, type=COUNT, help="Pipeline stages.")
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
    "--gpu-memory-utilization", default=0.9, show_default=True, type=SHARE, help="The engine's own option."
)
@click.option(
    "--block-size", type=COUNT, metavar="N", help=f"Tokens a block. Default: the engine's, else {BLOCK_SIZE}."
)
@click.option(
    "--kv-dtype",
    default="auto",
    show_default=True,
    type=click.Choice(KV_DTYPES),
    help="Type of the KV cache.",
)
@click.option(
    "--max-num-batched-tokens",
    type=COUNT,
    help="Token budget of a step. Default: 8192, or what the engine's own figures say.",
)
@click.option("--context", type=COUNT, help="Tokens of a sequence. Default: the engine's, or the model's.")
@click.option("--encoder-tokens", type=COUNT, help="Image or audio tokens that cross attention keeps.")
@click.option("--engine", type=click.Choice(sorted(ENGINES)), help="What runs at --upstream; unset: ask.")
@click.option("--total-blocks", type=COUNT, metavar="N", help="Of --upstream, as for serve.")
@click.option("--max-seqs", type=COUNT, metavar="N", help="Of --upstream, as for serve.")
@click.option("--lookahead", type=click.IntRange(0), metavar="N", help="Of --upstream, as for serve.")
@click.option("--upstream-ca", type=click.Path(exists=True, dir_okay=False), metavar="FILE", help="Its CA.")
@click.option(
    "--api-key-env",
    default=API_KEY,
    show_default=True,
    metavar="NAME",
    help="Environment variable with the API key of --upstream.",
)
@click.option("--safety-fraction", default=0.90, show_default=True, type=SHARE)
@click.option(
    "--shape", "shapes", type=Shape(), multiple=True, metavar="PROMPT:CAP", help="A request; repeatable."
)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Draw a chart.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def plan(
    model_config: BinaryIO | None,
    upstream: str | None,
    gpu_memory: int | None,
    shapes: tuple[ShapeOf, ...],
    safety_fraction: float,
    plot: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Show what a model's KV cache costs, and how many requests a GPU, or an engine, holds at once.

    Bytes are for one GPU, bf16 unless --kv-dtype says otherwise. Exit status: 0; 1 where the engine
    does not answer; 2 where something that is needed is not known: what is known is printed then, too.

    \b
    Examples:
      kvgate plan --model-config config.json
      kvgate plan --model-config config.json --gpu-memory 80GiB --tp 2 --weights-gib 65 \\
        --shape 2000:500 --shape 2000:unset --plot plan.png
      kvgate plan --upstream http://127.0.0.1:8000
      kvgate plan --upstream http://127.0.0.1:8081 --total-blocks 8192 --json
    """
    given = [f"--{name.replace('_', '-')}" for name in ENGINE_OPTIONS if options[name] is not None]
    if upstream is None and given:
        raise click.UsageError(f"{', '.join(given)}: only with --upstream URL")
    if upstream is not None and gpu_memory is not None:
        raise click.UsageError("--gpu-memory and --upstream: plan for hardware, or for an engine that runs")
    if upstream is None and model_config is None:
        raise click.UsageError("give --model-config FILE, or --upstream URL of an engine that runs, or both")
    pool: Pool | None = None
    try:
        config = None if model_config is None else _read(model_config)
        serving = _serving(options)
        figures: dict[str, Any] = {}
        geometry = None
        if config is not None:
            geometry = from_config(config)
            figures = model_figures(geometry, serving)
        if upstream is not None:
            engine = ask(
                upstream,
                options["engine"],
                _given(options, config, serving, safety_fraction),
                _key(options["api_key_env"]),
                options["upstream_ca"],
            )
            figures |= engine_figures(upstream, engine, shapes, safety_fraction)
            pool = engine.pool
        elif gpu_memory is not None and geometry is not None:
            pool = _pool_of(gpu_memory, geometry, serving, shapes, options)
            shapes = shapes or shapes_within(pool.context)
            figures |= layout_figures(pool.layout) | pool_figures(pool, shapes, safety_fraction)
        elif plot is not None:
            raise click.UsageError("--plot draws concurrency, which needs --gpu-memory or --upstream")
    except UnknownGeometry as unknown:
        raise click.UsageError(str(unknown)) from None
    if plot is not None and pool is not None:
        _draw(plot, pool, shapes or shapes_within(pool.context), safety_fraction)
    if as_json:
        click.echo(json.dumps(figures, indent=2))
    else:
        # Piped output is read by tools and logs, where a width guessed as 80 would fold the tables.
        show(Console(highlight=False, width=None if sys.stdout.isatty() else 120), figures)
    if figures.get("unknown"):
        sys.exit(UNKNOWN)


def _key(variable: str) -> str | None:
    try:
        return key_from(variable)
    except ValueError as wrong:
        raise click.UsageError(str(wrong)) from None


def _pool_of(
    memory: int,
    geometry: ModelGeometry,
    serving: Serving,
    shapes: tuple[ShapeOf, ...],
    options: dict[str, Any],
) -> Capacity:
    weights, other = (int(options[name] * 2**30) for name in ("weights_gib", "other_gib"))
    hardware = Hardware(memory, options["gpu_memory_utilization"], weights, other)
    context = options["context"]
    known = shapes or shapes_within(context or geometry.context or 1)
    return capacity(geometry, serving, hardware.kv_bytes(serving), context, known)


def _read(source: BinaryIO) -> dict[str, Any]:
    try:
        config = json.loads(source.read())
    except ValueError as wrong:
        raise UnknownGeometry(f"the model configuration is not JSON: {wrong}") from None
    if not isinstance(config, dict):
        raise UnknownGeometry("the model configuration holds no JSON object")
    return config


def _given(
    options: dict[str, Any], config: dict[str, Any] | None, serving: Serving, safety_fraction: float
) -> Given:
    names = ("total_blocks", "block_size", "context", "max_seqs", "lookahead")
    given = Given(**{name: options[name] for name in names}, safety_fraction=safety_fraction)
    return given if config is None else replace(given, model_config=config, serving=serving)


def _serving(options: dict[str, Any]) -> Serving:
    return Serving(
        block_size=options["block_size"] or BLOCK_SIZE,
        kv_dtype=options["kv_dtype"],
        tp=options["tp"],
        pp=options["pp"],
        max_batched_tokens=options["max_num_batched_tokens"],
        encoder_tokens=options["encoder_tokens"],
    )


def _draw(path: Path, pool: Pool, shapes: tuple[ShapeOf, ...], safety_fraction: float) -> None:
    try:
        from kvgate.cli.plan_chart import draw
    except ImportError:
        raise click.ClickException("--plot needs matplotlib: pip install 'kvgate[plot]'") from None
    try:
        draw(path, pool, tuple(dict.fromkeys(shape[0] for shape in shapes)), safety_fraction)
    except (OSError, ValueError) as failed:
        raise click.ClickException(f"the chart could not be written to {path}: {failed}") from None
