"""`kvgate storm URL`: load a server with many clients, and report what they saw.

Promises: bounded in requests and in time; asks before it sends load to a machine that is not this one;
Ctrl-C ends it and prints the figures so far. The exit status says whether streams died, not whether
some were refused.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvgate.cli.storm_view import draw, plot_library, table
from kvgate.lab.storm import Outcome
from kvgate.lab.storm_load import Load, loads
from kvgate.lab.storm_plan import MIX, Arrivals, Recipe, Shape, parse_clients, plan, read_trace
from kvgate.lab.storm_report import report

PATH = "/v1/chat/completions"


def _parsed(read: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A click callback that turns `ValueError` into a message about the option."""

    def callback(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
        try:
            return tuple(read(each) for each in value) if isinstance(value, tuple) else read(value)
        except ValueError as wrong:
            raise click.BadParameter(str(wrong), ctx, parameter) from None

    return callback


def _server(text: str) -> str:
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{text!r} is not an address such as http://127.0.0.1:8080")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


@click.command()
@click.argument("url", callback=_parsed(_server))
@click.option("--requests", type=click.IntRange(1, 1_000_000), default=100, show_default=True,
              help="Most requests that are asked; retries are not counted.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(1, 3600), default=60.0, show_default=True,
              help="No request is begun after that; what runs gets 30 s more.")  # fmt: skip
@click.option("--arrivals", type=click.Choice([each.value for each in Arrivals if each != Arrivals.TRACE]),
              default="closed", show_default=True,
              help="closed: each client asks anew when it is done. poisson: at random. burst: three times "
                   "the rate in the first third of every 30 s.")  # fmt: skip
@click.option("--concurrency", type=click.IntRange(1, 10_000), default=16, show_default=True,
              help="Clients of a closed storm.")  # fmt: skip
@click.option("--rate", type=click.FloatRange(0.01, 10_000), default=5.0, show_default=True,
              help="Requests a second of the others, on average.")  # fmt: skip
@click.option("--trace", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE",
              help="Replay a CSV (or .csv.gz) with arrival_s, prompt_tokens, output_tokens.")  # fmt: skip
@click.option("--speed", type=click.FloatRange(0.01, 1000), default=1.0, show_default=True,
              help="How much faster than recorded.")  # fmt: skip
@click.option("--shape", "shapes", multiple=True, callback=_parsed(Shape.parse),
              metavar="PROMPT:CAP[:WEIGHT]",
              help="Tokens of the prompt (about) and the output cap, a number or 'unset'; may be repeated. "
                   "Unset: " + " ".join(f"{s.prompt}:{s.cap}:{s.weight:g}" for s in MIX) + ".")  # fmt: skip
@click.option("--clients", default="obeying", callback=_parsed(parse_clients), metavar="KIND=SHARE,...",
              show_default=True,
              help="obeying: comes back when told. sdk: as OpenAI's library, three tries. stubborn: "
                   "hammers. giving-up: goes at once.")  # fmt: skip
@click.option("--keys", type=click.IntRange(1, 1000), default=1, show_default=True,
              help="API keys that the requests are dealt to at random.")  # fmt: skip
@click.option("--api-key", "api_keys", multiple=True, envvar="KVGATE_STORM_API_KEY", metavar="KEY",
              help="A real key instead; may be repeated.")  # fmt: skip
@click.option("--model", metavar="NAME", help="The model to ask for, where the server wants one.")
@click.option("--ignore-eos", is_flag=True, help="Ask for answers up to their cap (vLLM, llama.cpp).")
@click.option("--path", default=PATH, show_default=True, help="A chat endpoint that streams.")
@click.option("--seed", type=int, default=1, show_default=True, help="The same seed makes the same storm.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write the figures to FILE.")  # fmt: skip
@click.option("--plot", "plot_file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Draw the storm into FILE (.png, .svg, .pdf); needs kvgate[plot].")  # fmt: skip
@click.option("--yes", is_flag=True, help="Do not ask before sending load to another machine.")
def storm(url: str, **options: Any) -> None:
    """Send a storm of streamed chat requests to URL and report what the clients saw.

    Works against anything with OpenAI's chat API: the gate, the engine behind it, another gateway.
    Ctrl-C ends the storm and prints the figures so far.

    \b
    Exit status: 0  no stream died (refusals are no deaths)
                 1  streams died, or none finished
    """
    console = Console()
    _ask_first(url, yes=options["yes"])
    if options["plot_file"] is not None:
        plot_library()  # a storm of minutes must not end in a missing library
    load = _load(url, options)
    if not load.follows:
        raise click.ClickException("no request falls into that time: raise --seconds, --rate or --speed")
    asyncio.run(_run(console, load, options["seed"]))
    figures = report(load)
    console.print(table(figures))
    for death in figures.deaths[:5]:
        console.print(f"[red]died:[/] {death}", highlight=False)
    if options["json_file"] is not None:
        options["json_file"].write_text(json.dumps(figures.as_dict(), indent=2) + "\n")
    if options["plot_file"] is not None:
        draw(load, figures, options["plot_file"])
    if figures.died or not (figures.finished or load.was_stopped):
        raise click.exceptions.Exit(1)


def _ask_first(url: str, *, yes: bool) -> None:
    host = urlsplit(url).hostname or ""
    try:
        is_here = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_here = host == "localhost"
    if is_here:
        return
    click.secho(
        f"{host} is not this machine. A storm is a load test: whoever runs {host} and pays for it must "
        "have agreed.",
        fg="red",
        err=True,
    )
    if not yes:
        click.confirm("Send it?", abort=True, err=True)


def _load(url: str, options: dict[str, Any]) -> Load:
    arrivals, recorded = Arrivals(options["arrivals"]), []
    if options["trace"] is not None:
        arrivals = Arrivals.TRACE
        try:
            recorded = read_trace(options["trace"], speed=options["speed"])
        except ValueError as wrong:
            raise click.UsageError(str(wrong)) from None
    keys = options["api_keys"] or tuple(f"kvgate-storm-{n}" for n in range(1, options["keys"] + 1))
    recipe = Recipe(
        requests=options["requests"],
        seconds=options["seconds"],
        arrivals=arrivals,
        rate=options["rate"],
        shapes=options["shapes"] or MIX,
        clients=options["clients"],
        keys=len(keys),
        seed=options["seed"],
    )
    return Load(
        url + options["path"],
        loads(plan(recipe, recorded)),
        arrivals,
        concurrency=options["concurrency"],
        model=options["model"],
        ignore_eos=options["ignore_eos"],
        # One made-up key says nothing, and an engine may want none.
        keys=keys if options["api_keys"] or len(keys) > 1 else (),
        seconds=options["seconds"],
    )


async def _run(console: Console, load: Load, seed: int) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, load.stop)
    console.print(
        f"{len(load.follows)} requests at most, {load.arrivals.value}, seed {seed}, to {load.url}",
        highlight=False,
        soft_wrap=True,
    )
    columns: tuple[Any, ...] = (
        BarColumn(bar_width=20),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:
        bar = bars.add_task("", total=len(load.follows), state="")

        def tell(load: Load) -> None:
            counts = load.outcomes()
            running = counts.pop(Outcome.RUNNING, 0)
            parts = [f"{running} under way", *(f"{n} {outcome.value}" for outcome, n in counts.items())]
            refusals = sum(follow.stream.refusals for follow in load.follows)
            parts.append(f"{refusals} refusals")
            bars.update(bar, completed=counts.total(), state=", ".join(parts))

        await load.run(tell, seed=seed)
