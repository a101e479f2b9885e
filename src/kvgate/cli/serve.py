"""`kvgate serve`: the gateway and its admin server in one process, until a signal.

Promises: one ready line on stdout, and only when both ports answer; SIGTERM or SIGINT lets running
answers finish (up to --drain-timeout) and exits with 0; a second one ends at once; SIGHUP reads the
options again; the embedded engine never outlives the command; what the user can mend is told
without a traceback.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import replace
from types import FrameType
from typing import Any, NoReturn

import click
import uvloop

from kvgate.cli.option import ENVIRONMENT_PREFIX
from kvgate.cli.options import ARGUMENTS, ServeCommand, serve_options, settings_from
from kvgate.cli.reloading import Reloader
from kvgate.config import Settings, at
from kvgate.core.records import Misuse, PoolFacts
from kvgate.edge import open_files
from kvgate.edge.admin import AdminServer
from kvgate.edge.embedded import EmbeddedEngine, EmbeddedUnavailable
from kvgate.edge.gateway import Gateway
from kvgate.edge.listening import UNIX
from kvgate.edge.observing.collector import Collector
from kvgate.edge.upstreams.access import access_of
from kvgate.edge.upstreams.sizing import SizesUnknown, given_for
from kvgate.edge.upstreams.upstream import AUTO_START, NEEDED, facts_of, label_of, tenants_of

# Exit status of a process that a second signal ended: 128 + its number, as shells count.
INTERRUPTED = 128 + signal.SIGINT

SIZES = (
    *(*NEEDED, "max_seqs", "lookahead", "model_config", "tokenizer"),
    *("upstream_api_key_env", "upstream_api_key_file"),
)


def check(settings: Settings) -> None:
    """Say everything that is wrong with the combination of options, in one error."""
    if settings.tls_key is not None and settings.tls_cert is None:
        raise click.UsageError("--tls-key needs --tls-cert: a key alone makes no TLS.")
    is_secured = any(given.url.startswith("https:") for given in settings.upstreams)
    if settings.upstream_ca is not None and not is_secured:
        raise click.UsageError("--upstream-ca: only with --upstream https://HOST:PORT.")
    try:
        tenants_of(settings, 1)
        for given in settings.upstreams:
            given_for(given, settings)
            access_of(given, settings)
            _check_facts(facts_of(given, settings))
    except (Misuse, ValueError) as wrong:
        raise click.UsageError(str(wrong)) from None
    labels = [given.label or label_of(given.url) for given in settings.upstreams]
    if len(set(labels)) < len(labels):
        raise click.UsageError("two upstreams are the same, or have the same label: tell them apart.")
    if not settings.upstreams:
        _check_embedded(settings)


def _check_facts(facts: PoolFacts | None) -> None:
    if facts is not None and facts.usable_blocks < 1:
        raise click.UsageError(
            f"--total-blocks {facts.total_blocks} x --safety-fraction {facts.safety_fraction} leaves no "
            "usable block: every request would be refused."
        )


def _check_embedded(settings: Settings) -> None:
    given = [flag(name) for name in SIZES if getattr(settings, name) is not None]
    if settings.engine not in (None, "llamacpp"):
        given.append(f"--engine {settings.engine}")
    if given:
        raise click.UsageError(
            f"{', '.join(given)}: only with --upstream URL. Without it kvgate runs its embedded "
            "llama.cpp, sized by --embedded-cells, --embedded-slots and --embedded-context."
        )


def flag(field: str) -> str:
    """The long option of a field that has one of its own."""
    return "--" + field.replace("_", "-")


@click.command(cls=ServeCommand, context_settings={"auto_envvar_prefix": ENVIRONMENT_PREFIX})
@serve_options
def serve(**parameters: Any) -> None:
    """Run the gate in front of an engine.

    Without --upstream it starts its own small real engine (llama.cpp with a 270M model). Every option
    can also be set as KVGATE_NAME in the environment and as name in the file of --config; a flag beats
    the environment, which beats the file.

    What is not said of an engine is asked of it. Several engines are several --upstream, or [[upstream]]
    tables in the file; the model that a request names picks the engine.

    \b
    Examples:
      kvgate serve
      kvgate serve --config kvgate.toml
      kvgate serve --upstream http://127.0.0.1:8000
      kvgate serve --upstream http://10.0.0.1:8000 --upstream http://10.0.0.2:8000 --engine vllm
      kvgate serve --upstream http://127.0.0.1:8000 --engine vllm \\
        --total-blocks 4095 --block-size 16 --context 8192 --max-seqs 256
      kvgate serve --upstream http://127.0.0.1:8081 --engine llamacpp \\
        --total-blocks 8192 --block-size 1 --context 8192 --max-seqs 4
    """
    settings = settings_from(parameters)
    check(settings)
    arguments = click.get_current_context().meta[ARGUMENTS]
    # Until the loop has handlers of its own there is nothing to drain: both signals end with 0.
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, _leave)
    if settings.upstreams:
        uvloop.run(_serve(settings, None, None, arguments))
        return
    with _start_embedded(settings) as embedded:
        facts = _embedded_facts(settings, embedded)
        uvloop.run(_serve(_with_embedded(settings, embedded), facts, embedded, arguments))


def _leave(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


def _start_embedded(settings: Settings) -> EmbeddedEngine:
    try:
        return EmbeddedEngine.start(
            cells=settings.embedded_cells,
            slots=settings.embedded_slots,
            context=settings.embedded_context,
            progress=_progress,
        )
    except EmbeddedUnavailable as missing:
        raise click.ClickException(
            f"{missing}\nOr put the gate in front of an engine that runs already: kvgate serve --upstream URL"
        ) from None


def _progress(text: str) -> None:
    # On a terminal a percentage replaces the one before it; in a log only the last one is kept.
    counting = text.endswith("%") and not text.endswith(" 100 %")
    if sys.stderr.isatty():
        click.echo(f"\r\033[K{text}", err=True, nl=not counting)
    elif not counting:
        click.echo(text, err=True)


def _with_embedded(settings: Settings, embedded: EmbeddedEngine) -> Settings:
    return replace(settings, upstreams=at(embedded.url), engine="llamacpp")


def _embedded_facts(settings: Settings, embedded: EmbeddedEngine) -> PoolFacts:
    fraction = settings.safety_fraction
    facts = embedded.facts(AUTO_START if fraction == "auto" else fraction)
    if facts.usable_blocks < 1:
        raise click.UsageError("--embedded-cells x --safety-fraction leaves no usable cell.")
    return facts


async def _serve(
    settings: Settings, facts: PoolFacts | None, embedded: EmbeddedEngine | None, arguments: list[str]
) -> None:
    limit = open_files.raise_limit(settings.max_connections)
    too_few = open_files.warning(settings.max_connections, limit)
    if too_few is not None:
        _progress(f"kvgate: {too_few}")
    try:
        gateway = Gateway(settings, facts, connections_max=open_files.carried(limit))
    except ValueError as wrong:
        raise click.UsageError(str(wrong)) from None

    def read_again() -> Settings:
        again = serve.settings_again(arguments)
        check(again)
        return again if embedded is None else _with_embedded(again, embedded)

    reloader = Reloader(gateway, read_again, _progress)
    admin = AdminServer(gateway, settings.admin_host, settings.admin_port, reload=reloader)
    stop = asyncio.Event()
    _listen_for_signals(stop, embedded)
    try:
        await _bind(gateway.start(), settings.listen_host, settings.listen_port, "--listen")
    except SizesUnknown as unknown:
        raise click.UsageError(str(unknown)) from None
    try:
        await _bind(admin.start(), settings.admin_host, settings.admin_port, "--admin")
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.on_signal)
        scheme = "http" if gateway.tls is None else "https"
        click.echo(
            f"kvgate listening on {_url(settings.listen_host, gateway.port, scheme)}, "
            f"admin on {_url(settings.admin_host, admin.port)}, "
            f"engine {', '.join(f'{u.engine.name} at {u.url}' for u in gateway.engines)}"
        )
        sys.stdout.flush()
        gateway.collector = Collector(gateway.loop_lag.note)
        gateway.collector.start()
        await stop.wait()
    finally:
        # The admin server goes last: /status shows the draining, /readyz says no.
        await gateway.stop()
        await admin.stop()
        if embedded is not None:
            # Here and not only on the way out: the signal handlers go with the loop.
            await asyncio.to_thread(embedded.stop)


async def _bind(starting: Awaitable[object], host: str, port: int, option: str) -> None:
    try:
        await starting
    except OSError as wrong:
        # asyncio and socketserver word this differently; the system's own words are enough.
        why = os.strerror(wrong.errno) if wrong.errno and wrong.errno > 0 else str(wrong)
        where, other = f"{host}:{port}", "HOST:PORT (port 0: any free one)"
        if host.startswith(UNIX):
            where, other = host, "unix:/PATH"
        raise click.ClickException(
            f"cannot listen on {where}: {why}. Choose another address with {option} {other}."
        ) from None


def _listen_for_signals(stop: asyncio.Event, embedded: EmbeddedEngine | None) -> None:
    loop = asyncio.get_running_loop()

    def stopped(by: signal.Signals) -> None:
        if stop.is_set():
            _end_at_once(embedded, by)
        stop.set()
        if by is signal.SIGINT:
            _progress("kvgate: letting running answers finish; Ctrl-C again ends at once")

    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, stopped, each)


def _end_at_once(embedded: EmbeddedEngine | None, by: signal.Signals) -> NoReturn:
    if embedded is not None:
        with suppress(ProcessLookupError):
            os.kill(embedded.pid, signal.SIGKILL)
    # Not sys.exit: nothing that waits, in this loop or in a thread, may hold up the user.
    os._exit(128 + by)


def _url(host: str, port: int, scheme: str = "http") -> str:
    if host.startswith(UNIX):
        return host
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
