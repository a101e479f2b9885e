"""The outcome of a run as JSON, and several of them side by side as one markdown table.

Promise: a case that one run did not have is shown as absent, not as passed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvgate.lab.conformance.case import Result, Verdict, all_cases

SIGNS = {Verdict.PASS: "pass", Verdict.FAIL: "**fail**", Verdict.NOT_APPLICABLE: "n/a"}


class BadReport(ValueError):
    """A file is not what `--json` writes."""


def as_json(
    label: str, gateway: str, version: str, results: Sequence[Result], seconds: float
) -> dict[str, Any]:
    """What `--json` writes. `version` is that of the suite."""
    counts = Counter(result.verdict for result in results)
    return {
        "label": label,
        "gateway": gateway,
        "suite": version,
        "seconds": round(seconds, 1),
        "counts": {verdict.value: counts[verdict] for verdict in Verdict},
        "results": [
            {
                "name": result.case.name,
                "section": result.case.section,
                "title": result.case.title,
                "reference": result.case.reference,
                "verdict": result.verdict.value,
                "seen": result.seen,
                "seconds": result.seconds,
            }
            for result in results
        ],
    }


def compare(reports: Sequence[dict[str, Any]]) -> str:
    """A markdown table: a row a case, a column a gateway. Raises `BadReport`."""
    try:
        labels = [str(report["label"]) for report in reports]
        verdicts = [{r["name"]: Verdict(r["verdict"]) for r in report["results"]} for report in reports]
        titles = {r["name"]: (r["section"], r["title"]) for report in reports for r in report["results"]}
    except (KeyError, TypeError, ValueError) as error:
        raise BadReport(f"not a result of `kvgate conformance --json`: {error!r}") from None
    order = [case.name for case in all_cases()]
    names = sorted(titles, key=lambda name: order.index(name) if name in order else len(order))
    lines = [_row(["case", *labels]), _row(["---"] * (len(labels) + 1))]
    for verdict in Verdict:
        counts = [str(sum(v is verdict for v in column.values())) for column in verdicts]
        lines.append(_row([f"**{verdict.value}**", *counts]))
    section = ""
    for name in names:
        if titles[name][0] != section:
            section = titles[name][0]
            lines.append(_row([f"*{section}*", *[""] * len(labels)]))
        cells = [SIGNS[column[name]] if name in column else "absent" for column in verdicts]
        lines.append(_row([f"`{name}` {titles[name][1]}", *cells]))
    return "\n".join(lines) + "\n"


def listing() -> str:
    """The case list of docs/conformance.md."""
    lines = []
    section = ""
    for case in all_cases():
        if case.section != section:
            section = case.section
            header = [_row(["case", "what", "expected", "reference"]), _row(["---"] * 4)]
            lines += ["", f"### {section}", "", *header]
        lines.append(_row([f"`{case.name}`", case.title, case.expected, case.reference]))
    return "\n".join(lines).strip() + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
