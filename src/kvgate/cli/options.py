"""Every option of `kvgate serve`, once: its flag, environment variable, file key and Settings field.

Promises: the three ways to set an option are made from the one table below, so none can be
forgotten; a flag beats the environment, the environment beats the file; a value from the file is
held to the same rules as one typed on the command line; a key that does not exist is an error that
names the nearest one that does.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvgate.cli.addresses import Address, EngineUrl, ListenAddress, ParamType, UrlPath
from kvgate.config import Settings
from kvgate.wire.engines.known import ENGINES as KNOWN

ENVIRONMENT_PREFIX = "KVGATE"
# Where a context keeps what was typed, for reading the options again.
ARGUMENTS = "kvgate.arguments"


class Number(click.FloatRange):
    """A finite number: nan passes every range check, and infinite time-outs hide dead peers."""

    name = "NUMBER"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


@dataclass(frozen=True, slots=True)
class Option:
    """One row: `--name`, `KVGATE_NAME` and the file key `name` all set `fields` of Settings."""

    name: str
    fields: tuple[str, ...]
    type: ParamType
    section: str
    help: str
    metavar: str | None = None
    multiple: bool = False

    @property
    def parameter(self) -> str:
        return self.name.replace("-", "_")

    @property
    def environment(self) -> str:
        return f"{ENVIRONMENT_PREFIX}_{self.parameter.upper()}"

    @property
    def default(self) -> Any:
        """The default of Settings, written as a user would write it."""
        values = [getattr(DEFAULTS, field) for field in self.fields]
        if isinstance(values[0], bool):
            return str(values[0]).lower()
        return f"{values[0]}:{values[1]}" if len(values) == 2 else values[0]


DEFAULTS = Settings()
COUNT = click.IntRange(min=1)
SECONDS = Number(min=0)
TIMEOUT = Number(min=0, min_open=True)
FRACTION = Number(min=0, min_open=True, max=1)
BUSY = click.Choice(["429", "503", "529"])
ENGINES = click.Choice(sorted(KNOWN))
PEM_FILE = click.Path(exists=True, dir_okay=False)

_ADDRESSES, _ENGINE = "Addresses", "The engine and its sizes (with --upstream)"
_EMBEDDED, _ADMISSION, _LIMITS = "The embedded engine (without --upstream)", "Admission", "Limits"

# fmt: off
OPTIONS: tuple[Option, ...] = (
    Option("listen", ("listen_host", "listen_port"), ListenAddress(), _ADDRESSES,
           "Where clients connect: HOST:PORT (port 0 takes any free one) or unix:/PATH."),
    Option("tls-cert", ("tls_cert",), PEM_FILE, _ADDRESSES,
           "PEM file with the certificate that clients are shown; unset: plain HTTP.", "FILE"),
    Option("tls-key", ("tls_key",), PEM_FILE, _ADDRESSES,
           "PEM file with its key; unset: it is in the file of --tls-cert.", "FILE"),
    Option("admin", ("admin_host", "admin_port"), Address(), _ADDRESSES,
           "Where /status, /metrics, /healthz and /readyz are served. Keep it private."),
    Option("upstream", ("upstream",), EngineUrl(), _ADDRESSES,
           "The engine: http:// or https://HOST:PORT, or unix:/PATH. Without it, kvgate starts its "
           "embedded one.", "URL"),
    Option("upstream-ca", ("upstream_ca",), PEM_FILE, _ADDRESSES,
           "PEM file with the CA of an https:// engine; unset: the system's CAs.", "FILE"),
    Option("engine", ("engine",), ENGINES, _ENGINE, "What runs at --upstream."),
    Option("total-blocks", ("total_blocks",), COUNT, _ENGINE,
           "KV blocks of the engine. vLLM: the num_gpu_blocks that it prints, minus 1. "
           "llama.cpp: its -c.", "N"),
    Option("block-size", ("block_size",), COUNT, _ENGINE, "Tokens in a block. llama.cpp: 1.", "N"),
    Option("context", ("context",), COUNT, _ENGINE, "Tokens that one sequence may reach.", "N"),
    Option("max-seqs", ("max_seqs",), COUNT, _ENGINE,
           "Sequences that the engine runs at once; unset: no limit.", "N"),
    Option("embedded-cells", ("embedded_cells",), COUNT, _EMBEDDED, "KV cells, one a token.", "N"),
    Option("embedded-slots", ("embedded_slots",), COUNT, _EMBEDDED, "Sequences at once.", "N"),
    Option("embedded-context", ("embedded_context",), COUNT, _EMBEDDED, "Tokens a sequence may reach.", "N"),
    Option("safety-fraction", ("safety_fraction",), FRACTION, _ADMISSION,
           "Share of the blocks that may be reserved.", "F"),
    Option("default-output-cap", ("default_output_cap",), COUNT, _ADMISSION,
           "Cap enforced on a request that sets none; unset: the rest of the context.", "N"),
    Option("max-output-cap", ("max_output_cap",), COUNT, _ADMISSION,
           "Upper limit for every request's cap; unset: no limit.", "N"),
    Option("max-wait", ("max_wait",), SECONDS, _ADMISSION,
           "Seconds that a request may wait for room before it is refused.", "S"),
    Option("line-limit", ("line_limit",), COUNT, _ADMISSION, "Requests that may wait at once.", "N"),
    Option("allow-path", ("allow_paths",), UrlPath(), _ADMISSION,
           "POST path to pass on without a price; may be repeated. Nothing is reserved for it.",
           "PATH", multiple=True),
    Option("busy-status", ("busy_status",), BUSY, _ADMISSION, "Status of the answer 'come back later'."),
    Option("read-usage", ("read_usage",), click.BOOL, _ADMISSION,
           "Ask the engine for the usage of every stream, and take it out again where the client did not "
           "ask.", "BOOLEAN"),
    Option("max-body-bytes", ("max_body_bytes",), COUNT, _LIMITS,
           "Largest request body; a larger one gets 413.", "N"),
    Option("body-memory", ("body_memory",), COUNT, _LIMITS,
           "Bytes of request bodies that are held at once, over all clients.", "N"),
    Option("max-connections", ("max_connections",), COUNT, _LIMITS,
           "Client connections at once; one more is answered 503.", "N"),
    Option("abort-grace", ("abort_grace",), SECONDS, _LIMITS,
           "Seconds from closing a cancelled request to giving its blocks back; unset: the engine's own "
           "figure.", "S"),
    Option("connect-timeout", ("connect_timeout",), TIMEOUT, _LIMITS,
           "Seconds to connect to the engine.", "S"),
    Option("count-timeout", ("count_timeout",), TIMEOUT, _LIMITS,
           "Seconds for the engine to count a prompt.", "S"),
    Option("engine-idle-timeout", ("engine_idle_timeout",), TIMEOUT, _LIMITS,
           "Seconds of silence, before headers or between bytes, after which an answer has failed.", "S"),
    Option("client-timeout", ("client_timeout",), TIMEOUT, _LIMITS,
           "Seconds for one whole request to arrive, and for an idle connection to stay open.", "S"),
    Option("client-idle-timeout", ("client_idle_timeout",), TIMEOUT, _LIMITS,
           "Seconds that a client may take nothing of what waits for it, or not be there at all.", "S"),
    Option("drain-timeout", ("drain_timeout",), SECONDS, _LIMITS,
           "Seconds that running answers get to finish when kvgate stops.", "S"),
)
# fmt: on


class BadConfig(click.ClickException):
    """The file cannot be used. Exit status 2, like every other mistake in the options."""

    exit_code = 2


def serve_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Put every option on a click command, and --config before them."""
    for option in reversed(OPTIONS):
        command = click.option(
            f"--{option.name}",
            option.parameter,
            type=option.type,
            default=str(option.default) if option.type is BUSY else option.default,
            multiple=option.multiple,
            metavar=option.metavar,
            help=option.help,
            show_default=not option.multiple,
            show_envvar=True,
        )(command)
    return click.option(
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=_use_file,
        show_envvar=True,
        help="TOML file with any of these options, as in: max-wait = 2.5",
    )(command)


def _use_file(ctx: click.Context, _: click.Parameter, path: Path | None) -> None:
    # click looks at default_map after flags and environment: just the order that is promised.
    if path is not None:
        ctx.default_map = read_file(path)


def read_file(path: Path) -> dict[str, Any]:
    """The options set in a TOML file, by parameter name, as text for the same parsers as flags."""
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as wrong:
        raise BadConfig(f"{path}: {wrong}") from None
    by_parameter = {option.parameter: option for option in OPTIONS}
    found: dict[str, Any] = {}
    for key, value in table.items():
        option = by_parameter.get(key.replace("-", "_"))
        if option is None:
            raise BadConfig(f"{path}: {_unknown(key, value)}")
        if option.parameter in found:
            raise BadConfig(f"{path}: {option.name} is set twice, with - and with _")
        found[option.parameter] = _as_text(path, key, value, option)
    return found


def _unknown(key: str, value: object) -> str:
    if isinstance(value, dict):
        return f"[{key}] is a table; options stand at the top of the file, without one"
    names = [option.name for option in OPTIONS]
    near = difflib.get_close_matches(key.replace("_", "-").lower(), names, n=1, cutoff=0.0)
    return f"unknown option {key!r}. Did you mean {near[0]!r}?"


def _as_text(path: Path, key: str, value: object, option: Option) -> str | list[str]:
    if option.multiple:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise BadConfig(f"{path}: {key} must be a list of strings")
        return value
    if option.type is click.BOOL:
        if not isinstance(value, bool):
            raise BadConfig(f"{path}: {key} must be true or false, got {value!r}")
        return str(value).lower()
    wants_number = isinstance(option.type, click.IntRange | click.FloatRange) or option.type is BUSY
    wanted: tuple[type, ...] = (str,)
    if wants_number:
        wanted = (int, float) if isinstance(option.type, click.FloatRange) else (int,)
    # bool is an int in Python, but `max-wait = true` is a mistake.
    if isinstance(value, bool) or not isinstance(value, wanted):
        kind = "a number" if float in wanted else "a whole number" if wants_number else "a string"
        raise BadConfig(f"{path}: {key} must be {kind}, got {value!r}")
    return str(value)


def settings_from(parameters: Mapping[str, Any]) -> Settings:
    """The Settings that the parsed options mean."""
    values: dict[str, Any] = {}
    for option in OPTIONS:
        value = parameters[option.parameter]
        if len(option.fields) == 2:
            values[option.fields[0]], values[option.fields[1]] = value
        elif option.type is BUSY:
            values[option.fields[0]] = int(value)
        else:
            values[option.fields[0]] = tuple(value) if option.multiple else value
    return Settings(**values)


class ServeCommand(click.Command):
    """Shows the options in the table's sections instead of one long list; can be parsed again."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[ARGUMENTS] = list(args)
        return super().parse_args(ctx, args)

    def settings_again(self, arguments: list[str]) -> Settings:
        """The Settings that the same flags, the environment and the file mean now."""
        return settings_from(self.make_context("serve", list(arguments)).params)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {option.section: [] for option in OPTIONS}
        by_parameter = {option.parameter: option.section for option in OPTIONS}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                section = by_parameter.get(parameter.name or "", "Other")
                sections.setdefault(section, []).append(record)
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl(records)
