"""`kvgate explain`: what the running gateway would reserve for a request, and why.

The figures come from the gateway itself, through its admin server: the same code that prices real
requests, against the ledger as it is now. Nothing is reserved and nothing is generated.
"""

from __future__ import annotations

import json
import sys
from http.client import HTTPException
from typing import Any, BinaryIO
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import ProxyHandler, Request, build_opener

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvgate.config import Settings

# Above the admin server's own limit, so that its message arrives instead of our time-out.
ANSWER_WAIT = 35.0
DEFAULT_ADMIN = f"http://{Settings().admin_host}:{Settings().admin_port}"
# The names that clients give the output cap, the one that wins first.
CAP_FIELDS = ("max_completion_tokens", "max_tokens", "n_predict")


class NoAnswer(click.ClickException):
    """The gateway could not be asked."""

    exit_code = 2


@click.command()
@click.argument("request", metavar="REQUEST.json", type=click.File("rb"))
@click.option(
    "--path", default="/v1/chat/completions", show_default=True, help="The path it would be sent to."
)
@click.option(
    "--admin",
    default=DEFAULT_ADMIN,
    show_default=True,
    envvar="KVGATE_ADMIN",
    show_envvar=True,
    metavar="URL",
    help="Admin server of the running gateway, as URL or HOST:PORT.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the gateway's answer as JSON.")
def explain(request: BinaryIO, path: str, admin: str, as_json: bool) -> None:
    """Show what a request would reserve, and whether it would be admitted now.

    REQUEST.json is the body that a client would send; - reads it from standard input. Exit status: 0
    when the gateway answered (whatever it decided), 2 when it could not be asked.

    \b
    Examples:
      kvgate explain request.json
      kvgate explain completion.json --path /v1/completions
      echo '{"messages": [{"role": "user", "content": "Hi"}]}' | kvgate explain - --json
    """
    body = request.read()
    answer = ask(admin if "://" in admin else f"http://{admin}", path, body)
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    # Piped output is read by tools and logs, where a width guessed as 80 would fold the reasons.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    if "prompt_tokens" in answer:  # else it was refused before there was anything to price
        console.print(table(answer, body))
    console.print(verdict(answer), soft_wrap=not console.is_terminal)


def ask(admin: str, path: str, body: bytes) -> dict[str, Any]:
    """The gateway's explanation; `NoAnswer` says why there is none."""
    where = f"{admin.rstrip('/')}/explain?path={quote(path, safe='/')}"
    try:
        # No proxy of the environment: the admin server is ours, and usually on this machine.
        opener = build_opener(ProxyHandler({}))
        asking = Request(where, data=body, headers={"content-type": "application/json"})
        with opener.open(asking, timeout=ANSWER_WAIT) as response:
            answer = json.loads(response.read())
    except HTTPError as refused:
        raise NoAnswer(f"the admin server at {admin} answered {refused.code}: {_message(refused)}") from None
    except json.JSONDecodeError:
        raise NoAnswer(f"what answers at {admin} is not kvgate's admin server") from None
    except (OSError, HTTPException, ValueError) as failed:
        why = getattr(failed, "reason", failed)
        raise NoAnswer(
            f"no gateway answers at {admin} ({why}). Is `kvgate serve` running? "
            "Its ready line names the admin address; give it with --admin URL."
        ) from None
    if not isinstance(answer, dict) or "decision" not in answer:
        raise NoAnswer(f"what answers at {admin} is not kvgate's admin server")
    return answer


def _message(refused: HTTPError) -> str:
    try:
        return str(json.loads(refused.read())["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return str(refused.reason)


def table(answer: dict[str, Any], body: bytes) -> Table:
    """The figures, in the order in which they follow from each other."""
    rows = Table(show_header=False, box=None, pad_edge=False)
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(justify="right", no_wrap=True)
    rows.add_column(style="dim")
    size = answer.get("block_size") or 1
    asked = cap_asked(answer, body)
    # What can never fit is measured against an empty pool, everything else against the present one.
    never = answer.get("reason") == "kv_capacity_exceeded"
    lines: list[tuple[str, object, str]] = [
        ("Prompt tokens", answer.get("prompt_tokens"), f"of a context of {_figure(answer.get('context'))}"),
        ("Output cap asked", asked, "" if answer.get("output_cap_was_set") else "unset"),
        ("Output cap enforced", answer.get("output_cap"), why_cap(answer, asked)),
        ("Sequences", answer.get("sequences"), ""),
        ("Blocks needed", answer.get("needed_blocks"), f"of {_figure(size)} token{'s' * (size != 1)}"),
        ("Tokens needed", answer.get("needed_tokens"), ""),
        ("Tokens free now", answer.get("free_tokens"), f"of {_figure(answer.get('usable_tokens'))} usable"),
        ("Cap that would fit", answer.get("output_cap_that_fits"), "in an empty pool" if never else "now"),
    ]
    for name, value, why in lines:
        rows.add_row(name, _figure(value), why)
    return rows


def cap_asked(answer: dict[str, Any], body: bytes) -> int | None:
    """What the request itself says: the answer only tells whether it said something."""
    if not answer.get("output_cap_was_set"):
        return None
    try:
        fields = json.loads(body)
    except ValueError:
        return None
    if not isinstance(fields, dict):
        return None
    caps = (fields.get(name) for name in CAP_FIELDS)
    return next((cap for cap in caps if isinstance(cap, int)), None)


def why_cap(answer: dict[str, Any], asked: int | None) -> str:
    """Where the enforced cap comes from."""
    cap, prompt, context = answer.get("output_cap"), answer.get("prompt_tokens"), answer.get("context")
    if cap is None or prompt is None or context is None:
        return "none: the prompt leaves no room in the context"
    rest = f"the rest of the context, {_figure(context)} - {_figure(prompt)}"
    fills_context = prompt + cap == context
    if not answer.get("output_cap_was_set"):
        return f"unset: {rest}" if fills_context else "unset: the default or limit of the gateway or engine"
    if cap == asked:
        return "as asked"
    return f"lowered to {rest}" if fills_context else "lowered to the gateway's limit or the context"


def verdict(answer: dict[str, Any]) -> Text:
    """One line that says what would happen now."""
    if answer["decision"] == "admit":
        return Text("Would be admitted now.", style="bold green")
    text = Text(f"Would be refused now: {answer.get('reason')}.", style="bold red")
    message = answer.get("message")
    return text.append(f"\n{message}", style="not bold default") if message else text


def _figure(value: object) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
