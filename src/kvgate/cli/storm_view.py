"""How the report of a storm is shown: a table, and with matplotlib a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from kvgate.lab.storm import Outcome
from kvgate.lab.storm_load import Load
from kvgate.lab.storm_report import Quantiles, Report


def table(figures: Report) -> Table:
    """What to look at first stands first."""
    made = Table(show_header=False)
    made.add_column(no_wrap=True)
    made.add_column(justify="right")
    rows = [
        ("asked in", f"{figures.asked} in {figures.seconds:.1f} s{' (stopped)' * figures.was_stopped}"),
        ("finished whole", f"{figures.finished}"),
        ("died mid-answer", f"[bold red]{figures.died}[/]" if figures.died else "0"),
        ("refused for good", f"{figures.refused}"),
        ("left by their clients", f"{figures.left}"),
        ("refusals", ", ".join(f"{n} {reason}" for reason, n in figures.refusals.items()) or "0"),
        ("retries", f"{figures.retries}"),
        ("attempts for each finished", _number(figures.attempts_per_success)),
        ("goodput", f"{figures.goodput:,.0f} tokens/s"),
        ("goodput over offered caps", _share(figures.goodput_over_offered)),
        ("tokens thrown away", f"{figures.tokens_thrown_away:,}"),
        ("wait for admission", _seconds(figures.wait)),
        ("time to first token", _seconds(figures.first_token)),
        ("between tokens", _seconds(figures.between_tokens)),
        ("stalls over 1 s", f"{figures.stalls}"),
        ("fairness between keys", _number(figures.fairness)),
        ("largest herd in 100 ms", _herd(figures)),
    ]
    for name, value in rows:
        made.add_row(name, value)
    return made


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _herd(figures: Report) -> str:
    return "-" if figures.herd is None else f"{figures.herd_retries} ({figures.herd:.0%} of the retries)"


def _seconds(times: Quantiles | None) -> str:
    if times is None:
        return "-"
    return f"p50 {times.p50:.3f}  p95 {times.p95:.3f}  p99 {times.p99:.3f}  max {times.longest:.3f} s"


def plot_library() -> Any:
    """matplotlib's Figure class. Raises a click error that tells how to get it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise click.ClickException("--plot needs matplotlib: pip install 'kvgate[plot]'") from None
    return Figure


def draw(load: Load, figures: Report, path: Path) -> None:
    """Two pictures: what happened in each second, and how long waits and first tokens took."""
    figure = plot_library()(figsize=(9, 7), layout="constrained")
    above, below = figure.subplots(2, 1)
    asked = [follow for follow in load.follows if follow.asked is not None]
    series = {
        "asked": [follow.asked for follow in asked],
        "admitted": [follow.admitted for follow in asked if follow.admitted is not None],
        "retries": [at for follow in asked for at in follow.retries],
    }
    seconds = range(int(figures.seconds) + 2)
    for name, moments in series.items():
        if moments:
            above.hist(moments, bins=list(seconds), histtype="step", label=name)
    above.set(xlabel="seconds", ylabel="each second", title=f"{figures.asked} requests to {load.url}")
    above.legend()
    finished = [f for f in asked if f.stream.outcome is Outcome.FINISHED]
    curves = {
        "wait for admission": [f.wait for f in finished if f.wait is not None],
        "time to first token": [
            f.stream.seconds_to_first_token for f in finished if f.stream.seconds_to_first_token is not None
        ],
    }
    for name, values in curves.items():
        _curve(below, name, values)
    below.set(xlabel="seconds", ylabel="share of the finished", ylim=(0, 1))
    if finished:
        below.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as wrong:
        raise click.ClickException(f"{path} cannot be drawn: {wrong}") from None


def _curve(axes: Any, name: str, values: Sequence[float]) -> None:
    ordered = sorted(values)
    axes.step(ordered, [(n + 1) / len(ordered) for n in range(len(ordered))], where="post", label=name)
