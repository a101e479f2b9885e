"""The figures as a table and as JSON: medians, and the lowest and highest of all repeats."""

from __future__ import annotations

import os
import platform
import statistics
from typing import Any

from relaybench.gateways import Gateway

ROWS = (
    ("request_us", "CPU a request, us, as many as go", 1),
    ("paced_request_us", "CPU a request, us, 1,000 a second", 1),
    ("chunk_us", "CPU a streamed chunk, us", 1),
    ("requests_per_s", "requests a second", 0),
    ("ttft_alone_p50_ms", "added to the first event, ms: p50", 2),
    ("ttft_alone_p99_ms", "p99", 2),
    ("ttft_beside_streams_p50_ms", "the same beside the streams: p50", 2),
    ("ttft_beside_streams_p99_ms", "p99", 2),
    ("resident_mb", "resident memory, MB", 0),
)


def summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Median, lowest and highest of every figure, and the values themselves."""
    result = {}
    for key in sorted({key for one in rounds for key in one}):
        values = [one[key] for one in rounds if key in one]
        result[key] = {
            "median": statistics.median(values),
            "lowest": min(values),
            "highest": max(values),
            "repeats": [round(value, 4) for value in values],
        }
    return result


def cell(figures: dict[str, Any], key: str, digits: int, streams: int) -> str:
    if key not in figures:
        return "none began"
    figure = figures[key]
    text = f"{figure['median']:,.{digits}f}"
    if len(figure["repeats"]) > 1:
        text += f" ({figure['lowest']:,.{digits}f} to {figure['highest']:,.{digits}f})"
    if key == "requests_per_s" and figures["busy"]["median"] < 0.95:
        text = f"at least {text}"  # the client and the engine were the limit
    begun = figures["streams_begun"]["lowest"]
    if key in ("chunk_us", "resident_mb") and begun < streams:
        text += f" with {begun:.0f} streams, all that began"
    return text


def table(gateways: list[Gateway], results: dict[str, Any], streams: int) -> str:
    """A Markdown table with one line for each gateway that could be measured, then those that could not."""
    lines = ["| | " + " | ".join(label for _, label, _ in ROWS) + " |"]
    lines.append("|---" * (len(ROWS) + 1) + "|")
    for gateway in gateways:
        result = results[gateway.name]
        if "figures" in result:
            cells = [cell(result["figures"], key, digits, streams) for key, _, digits in ROWS]
        else:
            cells = [result["state"]] + [""] * (len(ROWS) - 1)
        lines.append(f"| {gateway.name} {gateway.version} | " + " | ".join(cells) + " |")
    notes = [f"{name}: {r['state']}: {r['why']}" for name, r in results.items() if "why" in r]
    return "\n".join([*lines, "", *notes])


def conditions(plan: Any, repeats: int) -> dict[str, Any]:
    """What the figures hold for."""
    return {
        "benchmark": "relay",
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "repeats": repeats,
        "streams": plan.streams,
        "connections": plan.connections,
        "seconds": plan.seconds,
    }
