"""The chart of `kvgate plan --plot`: how many requests fit at once, against the output cap.

Needs matplotlib (the `plot` extra); nothing else imports this file. No display is used.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from kvgate.cli.plan_figures import Pool

# Okabe and Ito's palette: told apart with every common form of colour blindness. Lines differ in
# dash and marker too, for print in black and white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))
_MARKERS = "os^Dv*"
_FIRST_CAP = 64
_NONE = 0.7


def draw(path: Path, pool: Pool, prompts: tuple[int, ...], safety_fraction: float) -> None:
    """Write the chart; the format follows the file's ending (png, svg, pdf).

    Raises `OSError` where the file cannot be written, `ValueError` for an unknown ending.
    """
    figure = Figure(figsize=(9, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ends: dict[int, int] = {}
    for number, prompt in enumerate(prompts):
        style = number % len(_COLOURS)
        caps = _caps(pool.context - prompt)
        counts = [pool.holds(prompt, cap, safety_fraction).concurrent for cap in caps]
        # A logarithmic axis has no zero: what does not fit at all is drawn below one.
        shown = [max(count, _NONE) for count in counts]
        axes.plot(
            caps,
            shown,
            color=_COLOURS[style],
            linestyle=_DASHES[style],
            marker=_MARKERS[style],
            markersize=4.5,
            linewidth=2,
            label=f"{prompt:,} tokens",
        )
        axes.annotate(
            f"{counts[0]:,}",
            (caps[0], shown[0]),
            textcoords="offset points",
            xytext=(-8, 0),
            ha="right",
            va="center",
            color=_COLOURS[style],
        )
        ends.setdefault(counts[-1], caps[-1])
    for count, cap in ends.items():
        axes.annotate(
            f"{count:,}" if count else "none",
            (cap, max(count, _NONE)),
            textcoords="offset points",
            xytext=(8, 0),
            va="center",
            color="#444444",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    thousands = FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else "")
    axes.xaxis.set_major_formatter(thousands)
    axes.yaxis.set_major_formatter(thousands)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("Output cap in tokens (each line ends at an unset cap: the rest of the context)")
    axes.set_ylabel("Requests that fit at once")
    axes.set_title(
        "A lower output cap lets more requests in\n"
        f"{pool.total_blocks:,} blocks, context {pool.context:,}, safety fraction {safety_fraction:g}",
        loc="left",
        fontsize=11,
    )
    axes.grid(True, which="major", color="#DDDDDD", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.08)
    axes.legend(frameon=False, loc="lower left", title="Prompt")
    figure.savefig(path, dpi=150)


def _caps(rest: int) -> list[int]:
    """Powers of two below the rest of the context, and the rest itself."""
    caps = []
    cap = _FIRST_CAP
    while cap < rest:
        caps.append(cap)
        cap *= 2
    return [*caps, rest]
