"""What `kvgate doctor` shows: as a table for people, as JSON for scripts. No I/O but the printing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvgate.core.price import blocks_for
from kvgate.core.records import PoolFacts
from kvgate.edge.upstreams.discovery import Finding, Found, Level

UNREACHABLE, UNSAFE = 2, 1
# Prompt and cap of the requests that are counted on the pool.
SHAPES = ((500, 500), (2000, 1000), (8000, 2000))
_STYLES = {Level.UNSAFE: "bold red", Level.WARNING: "yellow", Level.NOTE: "dim"}


@dataclass(frozen=True, slots=True)
class Report:
    """What is shown: the facts found, all findings, the worst first."""

    url: str
    found: Found
    findings: tuple[Finding, ...]

    @property
    def is_safe(self) -> bool:
        return not self.found.missing and all(f.level is not Level.UNSAFE for f in self.findings)

    def status(self, *, strict: bool) -> int:
        if not self.found.is_up:
            return UNREACHABLE
        worried = strict and any(f.level is not Level.NOTE for f in self.findings)
        return UNSAFE if worried or not self.is_safe else 0


def as_plain(report: Report) -> dict[str, Any]:
    """The report as JSON has it."""
    found = report.found
    facts = found.facts
    return {
        "url": report.url,
        "engine": found.engine,
        "version": found.version,
        "reachable": found.is_up,
        "models": list(found.models),
        "ranks": found.ranks,
        "exact": found.is_exact,
        "facts": None if facts is None else _facts(facts),
        "context": found.context,
        "sources": dict(found.sources),
        "running": found.running,
        "waiting": found.waiting,
        "preemptions": found.preemptions,
        "unknown": list(found.unknown),
        "missing": list(found.missing),
        "findings": [
            {key: value for key, value in asdict(f).items() if key != "doubts"} for f in report.findings
        ],
        "holds": [] if facts is None else holds(facts),
        "safe": found.is_up and report.is_safe,
    }


def _facts(facts: PoolFacts) -> dict[str, Any]:
    names = ("total_blocks", "usable_blocks", "block_size", "context", "max_seqs", "lookahead")
    groups = 1 if facts.geometry is None else len(facts.geometry.groups)
    return {name: getattr(facts, name) for name in names} | {
        "safety_fraction": facts.safety_fraction,
        "groups": groups,
    }


def holds(facts: PoolFacts) -> list[dict[str, int]]:
    """How many requests of a few shapes fit at once."""
    shown = []
    for prompt, cap in SHAPES:
        if prompt + cap > facts.context:
            continue
        blocks = blocks_for(prompt, cap, facts)
        fit = facts.usable_blocks // blocks
        fit = fit if facts.max_seqs is None else min(fit, facts.max_seqs)
        shown.append({"prompt_tokens": prompt, "output_cap": cap, "blocks": blocks, "concurrent": fit})
    return shown


def show(console: Console, report: Report) -> None:
    """For people."""
    found = report.found
    console.print(
        Text(f"{found.engine} {found.version or ''} at {report.url}".replace("  ", " "), style="bold")
    )
    if not found.is_up:
        console.print(f"[bold red]{found.unknown[0]}[/]. Is the address right, and is it running?")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for name, value in _rows(found):
        table.add_row(name, value, Text(found.sources.get(name, ""), style="dim"))
    console.print(table)
    for held in holds(found.facts) if found.facts is not None else ():
        console.print(
            f"{held['concurrent']:>6,} at once of prompt {held['prompt_tokens']:,} + cap "
            f"{held['output_cap']:,} ({held['blocks']:,} blocks each)"
        )
    for unknown in found.unknown:
        console.print(Text.assemble(("unknown  ", "bold red"), unknown), soft_wrap=True)
    for finding in report.findings:
        head = (f"{finding.level.value:<8} ", _STYLES[finding.level])
        fix = f". Fix: {finding.fix}" if finding.fix else ""
        console.print(Text.assemble(head, f"{finding.code}: {finding.what}{fix}"), soft_wrap=True)
    if report.is_safe:
        console.print("[green]kvgate can price requests for this engine.[/]")
    else:
        console.print("[bold red]Not safe yet: see above.[/]")


def _rows(found: Found) -> list[tuple[str, str]]:
    rows = [("models", ", ".join(found.models) or "none")]
    facts = found.facts
    if facts is not None:
        rows += [
            (name, f"{getattr(facts, name):,}") for name in ("total_blocks", "usable_blocks", "block_size")
        ]
    rows.append(("context", "unknown" if found.context is None else f"{found.context:,}"))
    if facts is not None:
        rows.append(("max_seqs", "no limit known" if facts.max_seqs is None else f"{facts.max_seqs:,}"))
        if facts.geometry is not None:
            rows.append(("groups", f"{len(facts.geometry.groups)}"))
    rows.append(("ranks", f"{found.ranks}"))
    if found.preemptions is not None:
        rows.append(("preemptions", f"{found.preemptions:,}"))
    if found.running is not None:
        rows.append(("running", f"{found.running:,}, {found.waiting or 0:,} waiting"))
    return rows
