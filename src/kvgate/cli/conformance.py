"""`kvgate conformance`: runs the public suite against any gateway whose engine is the scripted one.

Promises: the exit status is 0 only if no case failed; what was seen is shown for each that did; an
interrupt ends the run with the results so far.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvgate import __version__
from kvgate.lab import conformance as suite
from kvgate.lab.conformance import report
from kvgate.lab.conformance.case import Case, Result, Verdict

# Exit status of a process that an interrupt ended: 128 + SIGINT, as shells count.
INTERRUPTED = 130
COLOURS = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.NOT_APPLICABLE: "yellow"}
File = click.Path(path_type=Path, dir_okay=False)


# fmt: off
@click.command()
@click.argument("url", required=False)
@click.option("--engine", metavar="ADDRESS",
              help="The scripted engine behind the gateway, as in 127.0.0.1:9000.")
@click.option("--only", metavar="PATTERN", help="Cases whose name or section matches; with * and ?.")
@click.option("--list", "only_list", is_flag=True, help="Show the cases and run none.")
@click.option("--json", "json_file", type=File, metavar="FILE", help="Write the results to FILE.")
@click.option("--label", help="Name of the gateway in the results.  [default: URL]")
@click.option("--timeout", "limit", type=click.FloatRange(min=1), default=suite.CASE_SECONDS,
              show_default=True, help="Seconds for one case; some have a longer limit of their own.")
@click.option("--total-blocks", type=click.IntRange(1), default=4096, show_default=True,
              help="KV blocks that the gateway was told of.")
@click.option("--block-size", type=click.IntRange(1), default=1, show_default=True, help="Tokens in a block.")
@click.option("--context", type=click.IntRange(64), default=2048, show_default=True,
              help="Tokens that one sequence may reach.")
@click.option("--safety-fraction", type=click.FloatRange(0, 1, min_open=True), default=0.9,
              show_default=True, help="Share of the blocks that the gateway may reserve.")
@click.option("--abort-grace", type=click.FloatRange(0), default=1.5, show_default=True,
              help="Seconds for which it holds the room of a request that was broken off.")
@click.option("--model", default="scripted", show_default=True, help="Model name to ask for.")
@click.option("--header", "headers", multiple=True, metavar="LINE",
              help="Header line for every request, as in 'Authorization: Bearer key'; repeatable.")
@click.option("--gateway-pid", type=click.IntRange(1), help="Process to stop (SIGTERM) for the last case.")
@click.option("--compare", "reports", type=File, multiple=True, metavar="FILE",
              help="Print a markdown table of results written with --json; repeatable.")
def conformance(
    url: str | None,
    engine: str | None,
    only: str | None,
    only_list: bool,
    json_file: Path | None,
    label: str | None,
    limit: float,
    total_blocks: int,
    block_size: int,
    context: int,
    safety_fraction: float,
    abort_grace: float,
    model: str,
    headers: tuple[str, ...],
    gateway_pid: int | None,
    reports: tuple[Path, ...],
) -> None:
    """Test the gateway at URL against what went wrong in the field.

    The engine behind it must be the scripted one, which does what each case needs:

    \b
      python -m kvgate.lab.scripted_engine --port 9000
      (start the gateway in front of it)
      kvgate conformance http://127.0.0.1:8080 --engine 127.0.0.1:9000

    \b
    Exit status: 0    no case failed
                 1    a case failed
                 2    the gateway or the scripted engine cannot be reached
    """
    if reports:
        click.echo(_compared(reports), nl=False)
        return
    cases = suite.select(only)
    if not cases:
        raise click.UsageError(f"no case matches {only!r}; --list shows them.")
    console = Console()
    if only_list:
        for case in cases:
            console.print(f"{case.name:28} {case.section:20} {case.title}", markup=False, highlight=False)
        return
    if url is None or engine is None:
        raise click.UsageError("give the gateway's URL and --engine ADDRESS (see --help).")
    pool = suite.Pool(total_blocks, block_size, context, safety_fraction, abort_grace)
    try:
        setting = suite.Setting(
            url, suite.EngineControl(engine), pool, model=model, headers=headers, gateway_pid=gateway_pid
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    results: list[Result] = []
    started = time.perf_counter()
    interrupted = False
    try:
        asyncio.run(_run(console, setting, cases, limit, results))
    except KeyboardInterrupt:
        interrupted = True
    except (suite.NoEngine, suite.Unreachable) as error:
        raise click.UsageError(str(error)) from None
    seconds = time.perf_counter() - started
    console.print(_table(results, seconds, len(cases)))
    if json_file is not None:
        shown = report.as_json(label or url, url, __version__, results, seconds)
        json_file.write_text(json.dumps(shown, indent=2) + "\n")
    if interrupted:
        raise click.exceptions.Exit(INTERRUPTED)
    if any(result.verdict is Verdict.FAIL for result in results):
        raise click.exceptions.Exit(1)


async def _run(
    console: Console, setting: suite.Setting, cases: Sequence[Case], limit: float, results: list[Result]
) -> None:
    await setting.engine.stats()
    await setting.reach()

    def done(result: Result) -> None:
        results.append(result)
        colour = COLOURS[result.verdict]
        line = f"[{colour}]{result.verdict.value:4}[/] {result.case.name:28} {escape(result.case.title)}"
        console.print(line, highlight=False, soft_wrap=True)
        if result.seen:
            console.print(f"     [{colour}]{escape(result.seen)}[/]", highlight=False, soft_wrap=True)

    await suite.run(setting, cases, limit=limit, done=done)


def _table(results: Sequence[Result], seconds: float, wanted: int) -> Table:
    table = Table(title=f"{len(results)} of {wanted} cases in {seconds:.0f} s")
    table.add_column("section")
    for verdict in Verdict:
        table.add_column(verdict.value, justify="right")
    sections = dict.fromkeys(result.case.section for result in results)
    for section in [*sections, "all"]:
        counts = Counter(r.verdict for r in results if section in (r.case.section, "all"))
        cells = [_cell(verdict, counts[verdict]) for verdict in Verdict]
        table.add_row(section, *cells, end_section=section == list(sections)[-1] if sections else False)
    return table


def _cell(verdict: Verdict, count: int) -> str:
    return f"[{COLOURS[verdict]}]{count}[/]" if count else "0"


def _compared(paths: Sequence[Path]) -> str:
    pages: list[dict[str, Any]] = []
    try:
        for path in paths:
            pages.append(json.loads(path.read_text("utf-8")))
        return report.compare(pages)
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{error}") from None
