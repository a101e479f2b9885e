"""Every option of `kvgate serve`, once: its flag, environment variable, file key and Settings field.

Promises: the three ways to set an option are made from the one table below, so none can be
forgotten; a flag beats the environment, the environment beats the file; a value from the file is
held to the same rules as one typed on the command line; a key that does not exist is an error that
names the nearest one that does.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from kvgate.cli.addresses import Address, HeaderName, ListenAddress, UrlPath
from kvgate.cli.option import Number, Option, Share
from kvgate.cli.tables import ClassTable, Table, TenantTable, UpstreamTable
from kvgate.config import Settings
from kvgate.wire.engines.known import ENGINES as KNOWN

# Where a context keeps what was typed, for reading the options again.
ARGUMENTS = "kvgate.arguments"


COUNT = click.IntRange(min=1)
SECONDS = Number(min=0)
TIMEOUT = Number(min=0, min_open=True)
FRACTION = Share(min=0, min_open=True, max=1)
BUSY = click.Choice(["429", "503", "529"])
ENGINES = click.Choice(sorted(KNOWN))
FILE = click.Path(exists=True, dir_okay=False)
DIRECTORY = click.Path(exists=True, file_okay=False)

_ADDRESSES, _ENGINE = "Addresses", "The engine and its sizes (with --upstream)"
_EMBEDDED, _ADMISSION, _LIMITS = "The embedded engine (without --upstream)", "Admission", "Limits"

# fmt: off
OPTIONS: tuple[Option, ...] = (
    Option("listen", ("listen_host", "listen_port"), ListenAddress(), _ADDRESSES,
           "Where clients connect: HOST:PORT (port 0 takes any free one) or unix:/PATH."),
    Option("tls-cert", ("tls_cert",), FILE, _ADDRESSES,
           "PEM file with the certificate that clients are shown; unset: plain HTTP.", "FILE"),
    Option("tls-key", ("tls_key",), FILE, _ADDRESSES,
           "PEM file with its key; unset: it is in the file of --tls-cert.", "FILE"),
    Option("admin", ("admin_host", "admin_port"), Address(), _ADDRESSES,
           "Where /status, /metrics, /healthz and /readyz are served. Keep it private."),
    Option("upstream", ("upstreams",), UpstreamTable(), _ADDRESSES,
           "The engine: http:// or https://HOST:PORT, or unix:/PATH; may be repeated. Without it, kvgate "
           "starts its embedded one.", "URL", multiple=True),
    Option("upstream-ca", ("upstream_ca",), FILE, _ADDRESSES,
           "PEM file with the CA of an https:// engine; unset: the system's CAs.", "FILE"),
    Option("upstream-api-key-env", ("upstream_api_key_env",), click.STRING, _ADDRESSES,
           "Environment variable with the API key that the engine asks for.", "NAME"),
    Option("upstream-api-key-file", ("upstream_api_key_file",), FILE, _ADDRESSES,
           "Or a file with that key; read again with a reload.", "FILE"),
    Option("replace-client-keys", ("replace_client_keys",), click.BOOL, _ADDRESSES,
           "Send the engine its key instead of what clients send; unset: only with --api-keys.", "BOOLEAN"),
    Option("engine", ("engine",), ENGINES, _ENGINE, "What runs at --upstream; unset: it is asked."),
    Option("total-blocks", ("total_blocks",), COUNT, _ENGINE,
           "KV blocks of the engine, or of one of its ranks; unset: it is asked. vLLM: the num_gpu_blocks "
           "that it prints, minus 1. llama.cpp: its -c.", "N"),
    Option("block-size", ("block_size",), COUNT, _ENGINE, "Tokens in a block. llama.cpp: 1.", "N"),
    Option("context", ("context",), COUNT, _ENGINE, "Tokens that one sequence may reach.", "N"),
    Option("max-seqs", ("max_seqs",), COUNT, _ENGINE,
           "Sequences that the engine runs at once; unset: it is asked, else no limit.", "N"),
    Option("lookahead", ("lookahead",), click.IntRange(min=0), _ENGINE,
           "Tokens of speculative decoding that a sequence holds beyond its answer; unset: the engine is "
           "asked.", "N"),
    Option("model-config", ("model_config",), FILE, _ENGINE,
           "The model's config.json, for vLLM and a model with several kinds of layers.", "FILE"),
    Option("tensor-parallel", ("tensor_parallel",), COUNT, _ENGINE,
           "With --model-config: vLLM's --tensor-parallel-size.", "N"),
    Option("pipeline-parallel", ("pipeline_parallel",), COUNT, _ENGINE,
           "With --model-config: vLLM's --pipeline-parallel-size.", "N"),
    Option("max-batched-tokens", ("max_batched_tokens",), COUNT, _ENGINE,
           "With --model-config: vLLM's --max-num-batched-tokens; unset: the engine is asked.", "N"),
    Option("watch-engine-metrics", ("watch_engine_metrics",), click.BOOL, _ENGINE,
           "Compare the books with the engine's own figures, and reserve less where it shows that it has "
           "less.", "BOOLEAN"),
    Option("tokenizer", ("tokenizer",), DIRECTORY, _ENGINE,
           "The model's directory, with tokenizer.json, a SentencePiece model or tekken.json: prompts are "
           "counted here, in microseconds; unset: the engine is asked.", "DIR"),
    Option("embedded-cells", ("embedded_cells",), COUNT, _EMBEDDED, "KV cells, one a token.", "N"),
    Option("embedded-slots", ("embedded_slots",), COUNT, _EMBEDDED, "Sequences at once.", "N"),
    Option("embedded-context", ("embedded_context",), COUNT, _EMBEDDED, "Tokens a sequence may reach.", "N"),
    Option("safety-fraction", ("safety_fraction",), FRACTION, _ADMISSION,
           "Share of the blocks that may be reserved; auto: from 0.90 up to 1 while the engine's own "
           "count is exact and nothing is preempted.", "F"),
    Option("default-output-cap", ("default_output_cap",), COUNT, _ADMISSION,
           "Cap enforced on a request that sets none; unset: the rest of the context.", "N"),
    Option("max-output-cap", ("max_output_cap",), COUNT, _ADMISSION,
           "Upper limit for every request's cap; unset: no limit.", "N"),
    Option("max-wait", ("max_wait",), SECONDS, _ADMISSION,
           "Seconds that a request may wait for room before it is refused.", "S"),
    Option("waiting-comments", ("waiting_comments",), SECONDS, _ADMISSION,
           "Seconds after which, and between which, a stream that waits gets a comment; 0: none. The "
           "status is 200 from then on.", "S"),
    Option("line-limit", ("line_limit",), COUNT, _ADMISSION, "Requests that may wait at once.", "N"),
    Option("line-tokens", ("line_tokens",), COUNT, _ADMISSION,
           "Tokens that those who wait for one pool may need together; unset: no limit.", "N"),
    Option("sticky-header", ("sticky_header",), HeaderName(), _ADMISSION,
           "Requests with the same value in this header go to the same pool while they fit.", "NAME"),
    Option("tenant", ("tenants",), TenantTable(), _ADMISSION,
           "A tenant, as a table of the config file has it; may be repeated.", "TABLE", multiple=True),
    Option("class", ("classes",), ClassTable(), _ADMISSION,
           "The share that tenants of a priority may always have; may be repeated.", "TABLE", multiple=True),
    Option("tenant-per-key", ("tenant_per_key",), click.BOOL, _ADMISSION,
           "Each API key that no tenant names is a tenant of its own.", "BOOLEAN"),
    Option("trust-tenant-header", ("trust_tenant_header",), HeaderName(), _ADMISSION,
           "Header in which a proxy before kvgate names the tenant; unset: none is believed.", "NAME"),
    Option("api-keys", ("api_keys",), FILE, _ADMISSION,
           "File with the API keys that may come in, or their SHA-256; unset: the engine decides.", "FILE"),
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
           "Seconds for a prompt to be counted, by the engine or here.", "S"),
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


def _as_text(path: Path, key: str, value: object, option: Option) -> str | list[Any]:
    if isinstance(option.type, Table):
        tables = value if isinstance(value, list) else [value]
        wanted_items: type | tuple[type, ...] = (str, dict) if option.name == "upstream" else dict
        if not all(isinstance(item, wanted_items) for item in tables):
            raise BadConfig(f"{path}: {key} must be tables, each under [[{key}]]")
        return tables
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
    if option.type is FRACTION and value == "auto":
        return "auto"
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
