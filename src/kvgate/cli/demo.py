"""`kvgate demo`: the same storm of streams without and with the gate, on a real engine.

Promises: every figure is measured in this run; the exit status is 0 only when streams died without
the gate and every stream came through it whole.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvgate.edge.embedded import EmbeddedUnavailable
from kvgate.lab.storm import Outcome, StormResult
from kvgate.lab.strategies import COMPARED, DIRECT, GATED, SAFETY_FRACTION, Scene, Strategy, run

Results = dict[str, StormResult]

ROWS: tuple[tuple[str, Callable[[StormResult], str]], ...] = (
    ("streams asked", lambda r: f"{len(r.streams)}"),
    ("died mid-answer", lambda r: _bad(r.died)),
    ("finished whole", lambda r: f"{r.finished}"),
    ("refusals / retries", lambda r: f"{r.refusals} / {r.retries}"),
    ("tokens delivered whole", lambda r: f"{r.tokens_whole:,}"),
    ("tokens thrown away", lambda r: _bad(r.tokens_thrown_away)),
    ("longest stall", lambda r: f"{r.longest_stall:.2f} s"),
    ("wall time", lambda r: f"{r.seconds:.1f} s"),
)


@click.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write the figures to FILE.")  # fmt: skip
@click.option("--strategies", is_flag=True, help="Compare four ways of admitting the storm.")
@click.option("--cells", type=click.IntRange(256), default=2048, show_default=True,
              help="Size of the engine's KV cache, in tokens; rounded up to 256.")  # fmt: skip
@click.option("--slots", type=click.IntRange(1, 48), default=8, show_default=True,
              help="Sequences that the engine runs at once.")  # fmt: skip
@click.option("--streams", type=click.IntRange(1, 1000), default=8, show_default=True,
              help="Streams that are asked for, all at the same moment.")  # fmt: skip
@click.option("--max-tokens", type=click.IntRange(1), default=400, show_default=True,
              help="Output cap of a stream. One in four sets none.")  # fmt: skip
@click.option("--model", type=click.Path(path_type=Path, exists=True, dir_okay=False), hidden=True)
def demo(
    json_file: Path | None,
    strategies: bool,
    cells: int,
    slots: int,
    streams: int,
    max_tokens: int,
    model: Path | None,
) -> None:
    """See streams die on a real engine, and live behind the gate.

    Starts llama.cpp with Gemma 3 270M and a small KV cache that all streams share. Sends a storm of
    short prompts with large output caps, first straight to the engine, then through the gate. A
    refused client comes back when it is told to. Takes one to three minutes.

    \b
    Exit status: 0  streams died without the gate, and none with it
                 1  a stream died or never got in through the gate, or the storm was too weak
    """
    console = Console()
    scene = Scene(cells, slots, streams, max_tokens, model)
    _introduce(console, scene)
    started = time.perf_counter()
    chosen = COMPARED if strategies else (DIRECT, GATED)
    try:
        results = _run_all(console, scene, chosen)
    except EmbeddedUnavailable as error:
        raise click.ClickException(str(error)) from None
    console.print()
    console.print(_comparison(results) if strategies else _table(results))
    without, gated = results[chosen[0].key], results[chosen[-1].key]
    console.print(_meaning(scene, without, gated), highlight=False)
    problem = _problem(without, gated)
    if json_file is not None:
        figures = {
            "cells": cells,
            "slots": slots,
            "max_tokens": max_tokens,
            "safety_fraction": SAFETY_FRACTION,
            "ok": problem is None,
            "seconds": round(time.perf_counter() - started, 3),
            "runs": {key: result.as_dict() for key, result in results.items()},
        }
        json_file.write_text(json.dumps(figures, indent=2) + "\n")
    if problem is not None:
        console.print(f"[bold red]{problem}", highlight=False)
        raise click.exceptions.Exit(1)


def _introduce(console: Console, scene: Scene) -> None:
    console.print(
        f"{scene.streams} streams against llama.cpp with a KV cache of {scene.cells} tokens, shared by "
        f"{scene.slots} slots. {scene.streams - scene.unset} set max_tokens {scene.max_tokens}, "
        f"{scene.unset} set none.\n"
        f"The gate uses {SAFETY_FRACTION:.0%} of the cache. An unset cap would reserve the rest of the "
        f"context, more than a small cache can give, so the gate runs with default-output-cap and "
        f"max-output-cap {scene.max_tokens}.",
        highlight=False,
    )


def _run_all(console: Console, scene: Scene, chosen: tuple[Strategy, ...]) -> Results:
    results: Results = {}
    width = max(len(_label(strategy)) for strategy in chosen)
    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:
        for strategy in chosen:
            bar = bars.add_task(
                _label(strategy).ljust(width), total=scene.streams * scene.max_tokens, state=""
            )

            def starting(message: str, bar: Any = bar) -> None:
                bars.update(bar, state=message)

            def running(storm: StormResult, bar: Any = bar) -> None:
                bars.update(bar, completed=storm.tokens, state=_state(storm))

            results[strategy.key] = run(scene, strategy, starting=starting, progress=running)
            bars.stop_task(bar)
    return results


def _state(storm: StormResult) -> str:
    state = f"{storm.tokens:,} tokens, {storm.finished} finished"
    if running := storm.count(Outcome.RUNNING):
        state += f", {running} under way"
    if storm.died:
        state += f", [bold red]{storm.died} died[/]"
    if storm.refusals:
        state += f", {storm.refusals} refusals"
    return state


def _label(strategy: Strategy) -> str:
    unsafe = strategy in COMPARED and not strategy.safe
    return f"{strategy.label} (unsafe)" if unsafe else strategy.label


def _table(results: Results) -> Table:
    table = Table()
    table.add_column("")
    for strategy in (DIRECT, GATED):
        table.add_column(strategy.label, justify="right")
    for name, cell in ROWS:
        table.add_row(name, *(cell(results[strategy.key]) for strategy in (DIRECT, GATED)))
    return table


def _comparison(results: Results) -> Table:
    table = Table()
    table.add_column("admitted by", no_wrap=True)
    for heading in ("died", "finished", "refused", "tokens wasted", "wall time"):
        table.add_column(heading, justify="right")
    for strategy in COMPARED:
        result = results[strategy.key]
        table.add_row(
            _label(strategy),
            _bad(result.died),
            f"{result.finished}",
            f"{result.refusals}",
            _bad(result.tokens_thrown_away),
            f"{result.seconds:.1f} s",
        )
    return table


def _bad(number: int) -> str:
    return f"[bold red]{number:,}[/]" if number else "0"


def _meaning(scene: Scene, without: StormResult, gated: StormResult) -> str:
    """What the table says, in plain words."""
    total = scene.streams
    deaths = sorted({s.detail for s in without.streams if s.outcome is Outcome.DIED})
    said = f" ({'; '.join(deaths)})" if deaths else ""
    return (
        f"Without a reservation {without.died} of {total} streams died{said}, and "
        f"{without.tokens_thrown_away:,} tokens were computed for nothing: the engine let every prompt in "
        f"and ran out of cache while the answers grew.\n"
        f"With prompt + output cap reserved first, {gated.finished} of {total} finished whole and "
        f"{gated.died} died: who did not fit was told when to come back ({gated.refusals} refusals)."
    )


def _problem(without: StormResult, gated: StormResult) -> str | None:
    """Why this run proves nothing, or None."""
    if gated.died:
        return f"{gated.died} streams died through the gate: {'; '.join(gated.as_dict()['deaths'])}"
    if gated.finished < len(gated.streams):
        details = sorted({s.detail for s in gated.streams if s.outcome is Outcome.REFUSED})
        return f"{gated.refused} streams never got through the gate: {'; '.join(details)}"
    if not without.died:
        return (
            "No stream died without the gate: the storm was too weak. Ask for more --streams or --max-tokens."
        )
    return None
