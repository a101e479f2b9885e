"""The options of `kvgate serve`: one table, three ways to set each, and what is said of mistakes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from kvgate.cli.options import OPTIONS, Option, read_file, settings_from
from kvgate.cli.serve import serve
from kvgate.config import Settings, UpstreamSettings, at
from kvgate.core.tenancy import ClassRule, TenantRule

CONFIGURATION = Path(__file__).parents[2] / "docs" / "configuration.md"

# Options that name a file only look whether it is there.
FILE = CONFIGURATION
# A value of each option that is not its default: as text, and as the fields it sets.
OTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "listen": ("0.0.0.0:81", {"listen_host": "0.0.0.0", "listen_port": 81}),
    "tls-cert": (str(FILE), {"tls_cert": str(FILE)}),
    "tls-key": (str(FILE), {"tls_key": str(FILE)}),
    "upstream-ca": (str(FILE), {"upstream_ca": str(FILE)}),
    "upstream-api-key-env": ("ENGINE_KEY", {"upstream_api_key_env": "ENGINE_KEY"}),
    "upstream-api-key-file": (str(FILE), {"upstream_api_key_file": str(FILE)}),
    "replace-client-keys": ("true", {"replace_client_keys": True}),
    "tokenizer": (str(FILE.parent), {"tokenizer": str(FILE.parent)}),
    "read-usage": ("false", {"read_usage": False}),
    "body-memory": ("5000", {"body_memory": 5000}),
    "max-connections": ("7", {"max_connections": 7}),
    "client-idle-timeout": ("8", {"client_idle_timeout": 8.0}),
    "admin": ("[::1]:0", {"admin_host": "::1", "admin_port": 0}),
    "upstream": ("http://engine:8000/", {"upstreams": at("http://engine:8000")}),
    "lookahead": ("0", {"lookahead": 0}),
    "model-config": (str(FILE), {"model_config": str(FILE)}),
    "tensor-parallel": ("2", {"tensor_parallel": 2}),
    "pipeline-parallel": ("2", {"pipeline_parallel": 2}),
    "max-batched-tokens": ("2048", {"max_batched_tokens": 2048}),
    "watch-engine-metrics": ("false", {"watch_engine_metrics": False}),
    "line-tokens": ("9000", {"line_tokens": 9000}),
    "sticky-header": ("x-session-id", {"sticky_header": "x-session-id"}),
    "tenant": ('name="a",weight=2', {"tenants": (TenantRule("a", weight=2),)}),
    "class": ("priority=1,floor=0.5", {"classes": (ClassRule(1, 0.5),)}),
    "tenant-per-key": ("true", {"tenant_per_key": True}),
    "trust-tenant-header": ("x-team", {"trust_tenant_header": "x-team"}),
    "api-keys": (str(FILE), {"api_keys": str(FILE)}),
    "engine": ("vllm", {"engine": "vllm"}),
    "total-blocks": ("63", {"total_blocks": 63}),
    "block-size": ("128", {"block_size": 128}),
    "context": ("4096", {"context": 4096}),
    "max-seqs": ("16", {"max_seqs": 16}),
    "safety-fraction": ("0.5", {"safety_fraction": 0.5}),
    "default-output-cap": ("100", {"default_output_cap": 100}),
    "max-output-cap": ("200", {"max_output_cap": 200}),
    "max-wait": ("2.5", {"max_wait": 2.5}),
    "line-limit": ("10", {"line_limit": 10}),
    "waiting-comments": ("5", {"waiting_comments": 5.0}),
    "allow-path": ("/tokenize", {"allow_paths": ("/tokenize",)}),
    "busy-status": ("503", {"busy_status": 503}),
    "max-body-bytes": ("1000", {"max_body_bytes": 1000}),
    "abort-grace": ("0.25", {"abort_grace": 0.25}),
    "connect-timeout": ("1.5", {"connect_timeout": 1.5}),
    "count-timeout": ("3", {"count_timeout": 3.0}),
    "engine-idle-timeout": ("30", {"engine_idle_timeout": 30.0}),
    "client-timeout": ("20", {"client_timeout": 20.0}),
    "drain-timeout": ("0", {"drain_timeout": 0.0}),
    "embedded-cells": ("512", {"embedded_cells": 512}),
    "embedded-slots": ("2", {"embedded_slots": 2}),
    "embedded-context": ("512", {"embedded_context": 512}),
}
IDS = [option.name for option in OPTIONS]


@pytest.fixture(autouse=True)
def no_settings_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in OPTIONS:
        monkeypatch.delenv(option.environment, raising=False)
    monkeypatch.delenv("KVGATE_CONFIG", raising=False)


def parsed(*arguments: str) -> Settings:
    return settings_from(serve.make_context("serve", list(arguments)).params)


def toml(option: Option, text: str) -> str:
    if option.name in ("tenant", "class"):
        return f"[{{{text}}}]"
    if option.multiple:
        return f'["{text}"]'
    is_number = isinstance(option.type, click.IntRange | click.FloatRange) or option.name == "busy-status"
    return text if is_number or option.type is click.BOOL else f'"{text}"'


def config(tmp_path: Path, text: str) -> str:
    path = tmp_path / "kvgate.toml"
    path.write_text(text, "utf-8")
    return str(path)


def test_every_field_of_the_settings_belongs_to_exactly_one_option() -> None:
    fields = [field for option in OPTIONS for field in option.fields]
    assert sorted(fields) == sorted(field.name for field in dataclasses.fields(Settings))
    assert set(OTHER) == set(IDS)


def test_without_any_option_the_defaults_of_the_settings_hold() -> None:
    assert parsed() == Settings()


@pytest.mark.parametrize("option", OPTIONS, ids=IDS)
def test_an_option_can_be_set_by_flag(option: Option) -> None:
    text, fields = OTHER[option.name]
    assert parsed(f"--{option.name}", text) == dataclasses.replace(Settings(), **fields)


@pytest.mark.parametrize("option", OPTIONS, ids=IDS)
def test_an_option_can_be_set_by_environment(option: Option, monkeypatch: pytest.MonkeyPatch) -> None:
    text, fields = OTHER[option.name]
    monkeypatch.setenv(option.environment, text)
    assert parsed() == dataclasses.replace(Settings(), **fields)


@pytest.mark.parametrize("underscore", [False, True], ids=["dash", "underscore"])
@pytest.mark.parametrize("option", OPTIONS, ids=IDS)
def test_an_option_can_be_set_by_file(option: Option, underscore: bool, tmp_path: Path) -> None:
    text, fields = OTHER[option.name]
    key = option.parameter if underscore else option.name
    file = config(tmp_path, f"{key} = {toml(option, text)}\n")
    assert parsed("--config", file) == dataclasses.replace(Settings(), **fields)


@pytest.mark.parametrize(
    ("text", "upstream"),
    [
        ("https://engine", "https://engine:443"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
        ("unix:/run/engine.sock", "unix:/run/engine.sock"),
        ("http+unix://%2Frun%2Fengine.sock/v2", "http+unix://%2Frun%2Fengine.sock/v2"),
    ],
)
def test_an_engine_can_be_named_in_every_way_it_can_be_reached(text: str, upstream: str) -> None:
    assert parsed("--upstream", text).upstreams == at(upstream)


def test_a_unix_socket_to_listen_on_is_a_host_without_a_port() -> None:
    settings = parsed("--listen", "unix:/run/kvgate.sock")
    assert (settings.listen_host, settings.listen_port) == ("unix:/run/kvgate.sock", 0)


def test_a_flag_beats_the_environment_which_beats_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVGATE_CONFIG", config(tmp_path, 'max-wait = 1\nallow-path = ["/file"]\n'))
    assert (parsed().max_wait, parsed().allow_paths) == (1.0, ("/file",))
    monkeypatch.setenv("KVGATE_MAX_WAIT", "2")
    monkeypatch.setenv("KVGATE_ALLOW_PATH", "/one /two")
    assert (parsed().max_wait, parsed().allow_paths) == (2.0, ("/one", "/two"))
    by_flag = parsed("--max-wait", "3", "--allow-path", "/flag")
    assert (by_flag.max_wait, by_flag.allow_paths) == (3.0, ("/flag",))


@pytest.mark.parametrize("option", OPTIONS, ids=IDS)
def test_an_option_is_documented_with_its_environment_and_default(option: Option) -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in CONFIGURATION.read_text("utf-8").splitlines()
        if line.startswith(f"| `--{option.name}` | `KVGATE_")
    ]
    assert len(rows) == 1, f"one row of {CONFIGURATION.name} describes --{option.name}"
    _, environment, default, meaning = rows[0]
    assert environment == f"`{option.environment}`"
    expected = {None: "unset", (): "none"}.get(option.default, f"`{option.default}`")
    assert default == expected
    assert len(meaning) > 10


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("max-wiat = 1", "'max-wiat'. Did you mean 'max-wait'?"),
        ("total_block = 1", "Did you mean 'total-blocks'?"),
        ("listen_port = 1", "Did you mean 'listen'?"),
        ("[serve]\nmax-wait = 1", "[serve] is a table"),
        ("max-wait = true", "max-wait must be a number, got True"),
        ('max-wait = "1"', "max-wait must be a number"),
        ("read-usage = 1", "read-usage must be true or false, got 1"),
        ("context = 1.5", "context must be a whole number"),
        ("engine = 3", "engine must be a string"),
        ('allow-path = "/x"', "allow-path must be a list of strings"),
        ("max-wait = 1\nmax_wait = 2", "set twice"),
        ("max-wait", "kvgate.toml"),
    ],
)
def test_a_mistake_in_the_file_is_named(line: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(click.ClickException) as wrong:
        read_file(Path(config(tmp_path, line)))
    assert words in wrong.value.format_message()
    assert wrong.value.exit_code == 2


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kvgate.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(click.ClickException, match=r"kvgate\.toml"):
        read_file(path)


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--listen", "8080"),
        ("--listen", ":8080"),
        ("--listen", "host:99999"),
        ("--listen", "::1:8080"),
        ("--listen", "unix:kvgate.sock"),
        ("--listen", "unix:/" + 110 * "x"),
        ("--tls-cert", "/no/such/file"),
        ("--upstream", "https://host:1/v1"),
        ("--upstream", "ftp://host:1"),
        ("--upstream", "unix:engine.sock"),
        ("--upstream", "http://host:1/v1"),
        ("--upstream", "host:8000"),
        ("--upstream", "http://host:port"),
        ("--upstream", "http://me:secret@host:1"),
        ("--engine", "gpt"),
        ("--total-blocks", "0"),
        ("--safety-fraction", "0"),
        ("--safety-fraction", "1.1"),
        ("--safety-fraction", "nan"),
        ("--max-wait", "-1"),
        ("--max-wait", "inf"),
        ("--count-timeout", "0"),
        ("--busy-status", "500"),
        ("--allow-path", "tokenize"),
    ],
)
@pytest.mark.parametrize("by_file", [False, True], ids=["flag", "file"])
def test_a_value_out_of_range_is_refused_wherever_it_comes_from(
    flag: str, text: str, by_file: bool, tmp_path: Path
) -> None:
    option = next(option for option in OPTIONS if flag == f"--{option.name}")
    arguments = [flag, text]
    if by_file:
        arguments = ["--config", config(tmp_path, f"{option.name} = {toml(option, text)}")]
    with pytest.raises(click.BadParameter) as wrong:
        parsed(*arguments)
    assert flag in wrong.value.format_message()


TABLES = """
safety-fraction = "auto"
[[upstream]]
url = "http://a:1"
label = "big"
engine = "vllm"
total-blocks = 63
safety_fraction = 0.5
ranks = 2
models = ["m"]
aliases = { "gpt-4o" = "m" }
[[upstream]]
url = "http://b:1/"
[[tenant]]
name = "team"
weight = 2
[[class]]
priority = 1
floor = 0.2
"""


def test_engines_tenants_and_classes_are_tables_of_the_file(tmp_path: Path) -> None:
    settings = parsed("--config", config(tmp_path, TABLES))
    assert settings.safety_fraction == "auto"
    assert settings.upstreams == (
        UpstreamSettings(
            "http://a:1",
            "big",
            "vllm",
            total_blocks=63,
            safety_fraction=0.5,
            ranks=2,
            models=("m",),
            aliases=(("gpt-4o", "m"),),
        ),
        UpstreamSettings("http://b:1"),
    )
    assert settings.tenants == (TenantRule("team", weight=2),)
    assert settings.classes == (ClassRule(1, 0.2),)


def test_engines_by_flag_replace_those_of_the_file_and_may_be_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = config(tmp_path, TABLES)
    flags = ("--config", file, "--upstream", "http://c:1", "--upstream", "http://d:1")
    assert parsed(*flags).upstreams == at("http://c:1", "http://d:1")
    monkeypatch.setenv("KVGATE_UPSTREAM", "http://e:1 http://f:1")
    assert parsed("--config", file).upstreams == at("http://e:1", "http://f:1")
    for written in ('upstream = "http://g:1"', 'upstream = ["http://g:1"]'):
        monkeypatch.delenv("KVGATE_UPSTREAM", raising=False)
        assert parsed("--config", config(tmp_path, written)).upstreams == at("http://g:1")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ('[[upstream]]\nlabel = "a"', "needs a url"),
        ('[[upstream]]\nurl = "http://a:1"\nrank = 2', "has no 'rank'. There are url, label,"),
        ('[[upstream]]\nurl = "http://a:1"\nranks = 0', "ranks must be a whole number of at least 1, got 0"),
        ('[[upstream]]\nurl = "http://a:1"\ncontext = true', "context must be a whole number"),
        ('[[upstream]]\nurl = "http://a:1"\nengine = "x"', "engine must be one of generic, llamacpp"),
        ('[[upstream]]\nurl = "http://a:1"\nsafety-fraction = 2', 'at most 1, or "auto", got 2'),
        ('[[upstream]]\nurl = "http://a:1"\nmodels = "m"', "models must be a list of strings"),
        ('[[upstream]]\nurl = "http://a:1"\naliases = ["m"]', "aliases must be a table"),
        ('[[upstream]]\nurl = "http://a:1/v1"', "has a path"),
        ("upstream = 3", "must be tables, each under [[upstream]]"),
        ('[[tenant]]\nname = "a b"', "name must be 1 to 64"),
        ("[[class]]\npriority = 1", "floor is missing"),
        ('tenant = "a"', "must be tables, each under [[tenant]]"),
    ],
)
def test_a_mistake_in_a_table_is_named(table: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(click.ClickException) as wrong:
        parsed("--config", config(tmp_path, table))
    assert words in wrong.value.format_message()


def test_two_engines_that_cannot_be_told_apart_are_refused() -> None:
    answer = CliRunner().invoke(serve, ["--upstream", "http://a:1", "--upstream", "http://a:1/"])
    assert answer.exit_code == 2
    assert "tell them apart" in answer.output
