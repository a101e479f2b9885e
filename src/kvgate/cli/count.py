"""`kvgate count`: the prompt tokens of a request, by part, with the model's own tokenizer.

It needs no engine and no gateway: the count is made here, by the code that `kvgate serve --tokenizer`
uses.
"""

from __future__ import annotations

import json
import sys
from typing import Any, BinaryIO

import click
from rich.console import Console
from rich.table import Table

from kvgate.edge.counting.local_count import count_shape
from kvgate.tokens import BadTokenizer, CannotCount, Count, PromptCounter, load
from kvgate.wire.body import BadBody
from kvgate.wire.dialects.shape import RequestShape
from kvgate.wire.engines.known import ENGINES
from kvgate.wire.routes import route_for


class NotCounted(click.ClickException):
    """The request, or the tokenizer, cannot be used."""

    exit_code = 2


@click.command()
@click.argument("request", metavar="REQUEST.json", type=click.File("rb"))
@click.option(
    "--tokenizer",
    required=True,
    envvar="KVGATE_TOKENIZER",
    show_envvar=True,
    metavar="DIR",
    help="The model's directory, with tokenizer.json, a SentencePiece model or Mistral's tekken.json, and "
    "tokenizer_config.json.",
)
@click.option("--path", metavar="PATH", help="The path it would be sent to. [default: by the fields it has]")
@click.option(
    "--engine",
    type=click.Choice(sorted(ENGINES)),
    default="vllm",
    show_default=True,
    help="The engine whose endpoints and rules hold.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the count as JSON.")
def count(request: BinaryIO, tokenizer: str, path: str | None, engine: str, as_json: bool) -> None:
    """Count the prompt tokens of a request, as the engine would.

    REQUEST.json is the body that a client would send; - reads it from standard input. Exit status: 0
    when it was counted, 2 when it cannot be.

    \b
    Examples:
      kvgate count request.json --tokenizer ./Qwen3-8B
      kvgate count completion.json --tokenizer ./Qwen3-8B --path /v1/completions --json
    """
    raw = request.read()
    path = path or likely_path(raw)
    routes = ENGINES[engine].routes
    route = route_for(routes, b"POST", path.encode())
    if route is None:
        known = ", ".join(sorted(name.decode() for name in routes))
        raise NotCounted(f"{engine} has no priced endpoint at {path}; give --path with one of {known}")
    try:
        shape = route.read(raw)
        counter = load(tokenizer, chat_adds_bos=engine == "llamacpp")
        counts = count_shape(counter, shape, with_parts=True)
    except BadBody as error:
        raise NotCounted(f"the engine would refuse this request: {error}") from None
    except BadTokenizer as error:
        raise NotCounted(str(error)) from None
    except CannotCount as error:
        raise NotCounted(f"this request cannot be counted without the engine: {error}") from None
    answer = summary(shape, counts, counter)
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print(table(answer))


def likely_path(raw: bytes) -> str:
    """The endpoint that a body was most likely written for, by the field that holds its prompt."""
    try:
        fields = json.loads(raw)
    except ValueError:
        fields = None
    if not isinstance(fields, dict) or "messages" in fields:
        return "/v1/chat/completions"
    return "/v1/responses" if "input" in fields else "/v1/completions"


def summary(shape: RequestShape, counts: tuple[Count, ...], counter: PromptCounter) -> dict[str, Any]:
    """The answer: `prompt_tokens` is the sum over all prompts of the request."""
    many = len(counts) > 1
    parts = [
        {"name": f"prompts[{index}]" if many else part.name, "tokens": part.tokens}
        for index, one in enumerate(counts)
        for part in (one.parts if one.parts and not many else ())
    ] or [
        {"name": f"prompts[{index}]" if many else "prompt", "tokens": one.prompt_tokens}
        for index, one in enumerate(counts)
    ]
    inexact = [one for one in counts if not one.is_exact]
    return {
        "prompt_tokens": sum(one.prompt_tokens for one in counts),
        "sequences": shape.sequences,
        "output_cap": shape.output_cap,
        "parts": parts,
        "source": (inexact or counts)[0].source,
        "is_exact": not inexact,
        "counted_by": counter.counted_by,
    }


def table(answer: dict[str, Any]) -> Table:
    """The parts and their sum, then what else costs."""
    rows = Table(show_header=False, box=None, pad_edge=False)
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(justify="right", no_wrap=True)
    rows.add_column(style="dim")
    for part in answer["parts"]:
        rows.add_row(f"  {part['name']}", f"{part['tokens']:,}", "")
    exact = "exact" if answer["is_exact"] else "an upper bound"
    rows.add_row("Prompt tokens", f"{answer['prompt_tokens']:,}", f"{exact}, by {answer['counted_by']}")
    rows.add_row("Sequences", f"{answer['sequences']:,}", "")
    cap = answer["output_cap"]
    rows.add_row("Output cap asked", "-" if cap is None else f"{cap:,}", "unset" if cap is None else "")
    return rows
