"""`kvgate doctor`: what runs at an engine's address, what kvgate can know of it, and what is unsafe.

Promises: only GETs that change nothing; every finding has a stable code and says how to mend it; the
exit status is for scripts: 0 nothing unsafe and everything known, 1 something unsafe or unknown (with
--strict: or any warning), 2 the engine could not be asked.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from typing import Any, BinaryIO

import click
from rich.console import Console

from kvgate.cli.addresses import EngineUrl
from kvgate.cli.doctor_advice import unset_caps
from kvgate.cli.doctor_view import Report, as_plain, show
from kvgate.core.geometry import Serving
from kvgate.edge.relay.pool import EnginePool, EngineUnavailable
from kvgate.edge.tls import engine_context
from kvgate.edge.upstreams.access import Access, key_from
from kvgate.edge.upstreams.discovery import Finding, Found, Given, Level, discover, pool_fetch
from kvgate.wire.engines.known import ENGINES
from kvgate.wire.engines.readers import READERS

API_KEY = "KVGATE_API_KEY"
CONNECT_SECONDS = 5.0
COUNT = click.IntRange(1)


@click.command()
@click.argument("url", type=EngineUrl())
@click.option("--engine", type=click.Choice(sorted(ENGINES)), help="What runs there; unset: find out.")
@click.option("--total-blocks", type=COUNT, metavar="N", help="As for serve; beats what is read.")
@click.option("--block-size", type=COUNT, metavar="N", help="As for serve; beats what is read.")
@click.option("--context", type=COUNT, metavar="N", help="As for serve; beats what is read.")
@click.option("--max-seqs", type=COUNT, metavar="N", help="As for serve; beats what is read.")
@click.option("--model-config", type=click.File("rb"), metavar="FILE", help="config.json of a hybrid model.")
@click.option("--lookahead", type=click.IntRange(0), metavar="N", help="As for serve; beats what is read.")
@click.option("--tensor-parallel", default=1, type=COUNT, metavar="N", help="As for serve.")
@click.option("--pipeline-parallel", default=1, type=COUNT, metavar="N", help="As for serve.")
@click.option("--max-batched-tokens", type=COUNT, metavar="N", help="As for serve.")
@click.option("--upstream-ca", type=click.Path(exists=True, dir_okay=False), metavar="FILE", help="Its CA.")
@click.option(
    "--api-key-env",
    default=API_KEY,
    show_default=True,
    metavar="NAME",
    help="Environment variable with the engine's API key.",
)
@click.option("--admin", metavar="URL", help="Admin server of the kvgate before it, to tell foreign load.")
@click.option("--strict", is_flag=True, help="Exit with 1 on warnings too.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def doctor(
    url: str,
    engine: str | None,
    model_config: BinaryIO | None,
    tensor_parallel: int,
    pipeline_parallel: int,
    max_batched_tokens: int | None,
    upstream_ca: str | None,
    api_key_env: str,
    admin: str | None,
    strict: bool,
    as_json: bool,
    **sizes: Any,
) -> None:
    """Look at the engine at URL: its pool, what is unsafe, and what to do about it.

    Exit status: 0 nothing unsafe, 1 something unsafe or unknown, 2 the engine cannot be reached.

    \b
    Examples:
      kvgate doctor http://127.0.0.1:8000
      kvgate doctor http://127.0.0.1:8081 --total-blocks 8192
      kvgate doctor http://127.0.0.1:8000 --model-config config.json --json
    """
    given = Given(**sizes, model_config=_config(model_config))
    if model_config is not None:
        serving = Serving(tp=tensor_parallel, pp=pipeline_parallel, max_batched_tokens=max_batched_tokens)
        given = replace(given, serving=serving)
    try:
        key = key_from(api_key_env)
    except ValueError as wrong:
        raise click.UsageError(str(wrong)) from None
    report = asyncio.run(examine(url, engine, given, key, upstream_ca, admin))
    if as_json:
        click.echo(json.dumps(as_plain(report), indent=2))
    else:
        # Piped output is read by tools and logs, where a width guessed as 80 would fold it.
        show(Console(highlight=False, width=None if sys.stdout.isatty() else 160), report)
    sys.exit(report.status(strict=strict))


async def examine(
    url: str,
    engine: str | None = None,
    given: Given | None = None,
    key: str | None = None,
    ca: str | None = None,
    admin: str | None = None,
) -> Report:
    """Ask the engine at `url`, with `key` where it has one."""
    loop = asyncio.get_running_loop()
    tls = engine_context(ca) if url.startswith("https:") else None
    pool = EnginePool(url, loop, connect_timeout=CONNECT_SECONDS, idle_timeout=CONNECT_SECONDS, tls=tls)
    try:
        pool.access = Access(key)
        found = await discover(pool_fetch(pool), engine, given)
        findings = [*found.warnings, *unset_caps(found)]
        if found.is_up:
            findings += await _open_door(pool, found)
            findings += await _foreign(loop, found, admin)
    finally:
        pool.close()
    order = list(Level)[::-1]
    return Report(url, found, tuple(sorted(findings, key=lambda f: order.index(f.level))))


async def _open_door(pool: EnginePool, found: Found) -> list[Finding]:
    """Whether the engine answers those who have no key."""
    path = READERS[found.engine].guarded
    if path is None:
        return []
    status, _ = await pool_fetch(pool, [])("GET", path, None)
    if status != 200:
        return []
    is_local = pool.upstream.path is not None or pool.upstream.host in ("127.0.0.1", "::1", "localhost")
    return [
        Finding(
            "no_api_key",
            Level.NOTE if is_local else Level.WARNING,
            "the engine answers without an API key: whoever reaches its address passes by kvgate",
            "start it with --api-key and give the key to kvgate only (--upstream-api-key-env NAME), or let "
            "only kvgate reach it",
        )
    ]


async def _foreign(loop: asyncio.AbstractEventLoop, found: Found, admin: str | None) -> list[Finding]:
    """Requests that run there and did not come through kvgate."""
    running = (found.running or 0) + (found.waiting or 0)
    if admin is None:
        what = f"{running} requests run or wait there; kvgate's own can be told apart with --admin URL"
        return [Finding("load", Level.NOTE, what)] if running else []
    pool = EnginePool(admin, loop, connect_timeout=CONNECT_SECONDS, idle_timeout=CONNECT_SECONDS)
    try:
        _, text = await pool_fetch(pool)("GET", "/status", None)
        pools = json.loads(text)["pools"]
        ours = sum(int(each["reserved_seqs"]) for each in pools)
    except (OSError, EngineUnavailable, ValueError, KeyError, TypeError) as failed:
        return [
            Finding(
                "admin_unread", Level.WARNING, f"{admin} gave no status ({failed})", "see kvgate's ready line"
            )
        ]
    finally:
        pool.close()
    if running <= ours:
        return []
    return [
        Finding(
            "foreign_load",
            Level.UNSAFE,
            f"{running} sequences run or wait at the engine and kvgate has sent {ours}: others pass by it",
            "send them through kvgate, or give the engine an API key that only kvgate has "
            "(--upstream-api-key-env NAME)",
        )
    ]


def _config(source: BinaryIO | None) -> dict[str, Any] | None:
    if source is None:
        return None
    try:
        config = json.loads(source.read())
    except ValueError as wrong:
        raise click.UsageError(f"--model-config is not JSON: {wrong}") from None
    if not isinstance(config, dict):
        raise click.UsageError("--model-config holds no JSON object")
    return config
