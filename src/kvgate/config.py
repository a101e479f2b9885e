"""Every setting of the gateway, in one frozen record. `cli` fills it from file, environment and flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvgate.core.tenancy import ClassRule, TenantRule

MIB = 1024 * 1024
Fraction: TypeAlias = float | Literal["auto"]


@dataclass(frozen=True, slots=True)
class UpstreamSettings:
    """One engine. None: what `Settings` says for all of them, or what the engine tells.

    `label`: its name in metrics and `/status` (None: host and port). `total_blocks`: of one rank, where
    the engine has several data-parallel `ranks` (None: as many as it tells). `models`: names that it
    serves (empty: those that it lists). `aliases`: further names, each with the one that the engine knows.
    `api_key_env`, `api_key_file`: where its API key is, a variable or a file; `replace_client_keys`: it is
    sent instead of what clients send.
    """

    url: str  # http(s)://host:port, unix:/path
    label: str | None = None
    engine: str | None = None
    total_blocks: int | None = None
    block_size: int | None = None
    context: int | None = None
    max_seqs: int | None = None
    safety_fraction: Fraction | None = None
    lookahead: int | None = None
    model_config: str | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    max_batched_tokens: int | None = None
    tokenizer: str | None = None
    ranks: int | None = None
    models: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    api_key_env: str | None = None
    api_key_file: str | None = None
    replace_client_keys: bool | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """What `kvgate serve` runs with. Times in seconds, sizes in the unit of their name."""

    upstreams: tuple[UpstreamSettings, ...] = ()  # none: the embedded engine
    upstream_ca: str | None = None  # PEM file; None: the system's CAs
    upstream_api_key_env: str | None = None  # the variable that holds the key an engine asks for
    upstream_api_key_file: str | None = None  # or a file that holds it
    replace_client_keys: bool | None = None  # None: where `api_keys` is set
    engine: str | None = None  # a name in wire.engines.known; None: it is asked what it is
    listen_host: str = "127.0.0.1"  # or unix:/path, and port 0
    listen_port: int = 8080
    tls_cert: str | None = None  # PEM file; None: clients speak plain HTTP
    tls_key: str | None = None  # PEM file; None: in the file of tls_cert
    admin_host: str = "127.0.0.1"
    admin_port: int = 9090
    total_blocks: int | None = None
    block_size: int | None = None
    context: int | None = None
    max_seqs: int | None = None
    lookahead: int | None = None
    model_config: str | None = None  # config.json of a model with several kinds of layers
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    max_batched_tokens: int | None = None
    tokenizer: str | None = None  # the model's directory; None: the engine is asked for counts
    watch_engine_metrics: bool = True
    safety_fraction: Fraction = 0.90
    default_output_cap: int | None = None
    max_output_cap: int | None = None
    max_wait: float = 5.0
    waiting_comments: float = 0.0  # between comments to a stream that waits; 0: none
    line_limit: int = 1024
    line_tokens: int | None = None  # of all who wait for one pool; None: no limit
    sticky_header: str | None = None  # requests with the same value in it go to the same pool
    tenants: tuple[TenantRule, ...] = ()
    classes: tuple[ClassRule, ...] = ()
    tenant_per_key: bool = False
    trust_tenant_header: str | None = None
    api_keys: str | None = None  # file; None: the engine decides who may come in
    allow_paths: tuple[str, ...] = ()
    busy_status: int = 429  # 429, 503 or 529
    read_usage: bool = True  # ask the engine for the usage of streams, and keep it from the client
    max_body_bytes: int = 32 * MIB
    body_memory: int = 1024 * MIB  # all request bodies that are held at once
    max_connections: int = 16384
    abort_grace: float | None = None  # None: the engine's own figure
    connect_timeout: float = 5.0
    count_timeout: float = 10.0
    engine_idle_timeout: float = 600.0  # silence before headers or between bytes
    client_timeout: float = 60.0  # for one whole request head and body to arrive; idle keep-alive
    client_idle_timeout: float = 60.0  # a client takes nothing of what waits for it, or is not there
    drain_timeout: float = 30.0
    embedded_cells: int = 2048
    embedded_slots: int = 8
    # Below the usable cells, so that a request with no cap can be admitted at all.
    embedded_context: int = 1024


def at(*urls: str) -> tuple[UpstreamSettings, ...]:
    """Engines of which nothing is known but where they are."""
    return tuple(UpstreamSettings(url) for url in urls)
