"""A real vLLM with a tiny model and a small pool, and kvgate in front of it.

Promise: both are gone when their `with` ends, whatever happened inside.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
MAKE_MODEL = ROOT / "tests" / "vllm" / "make_model.py"
START_SECONDS = 300
MODEL = "tiny"


@dataclass(frozen=True)
class Model:
    """What vLLM is started with. `kind`: one of make_model.py's; `batched_tokens`: the most in a step.

    `layers` 0: as many as the kind has by itself. `blocks`: as vLLM counts them, with its null block.
    """

    kind: str = "dense"
    hidden: int = 128
    layers: int = 0
    blocks: int = 64
    batched_tokens: int = 2048

    @property
    def is_hybrid(self) -> bool:
        return self.kind != "dense"


@dataclass(frozen=True)
class Engine:
    """One that runs. `config`: its model's config.json, where we wrote it."""

    url: str
    model: Model
    config: Path | None


@dataclass(frozen=True)
class Gateway:
    """A kvgate that runs: its own address, its admin server's, and its process."""

    url: str
    admin: str
    pid: int

    def cpu_seconds(self) -> float:
        """User and system time of its process so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def metric(url: str, name: str) -> float:
    """A figure of vLLM's /metrics; 0 where it is missing."""
    found = re.search(rf"^{name}\{{[^}}]*\}} (\S+)$", httpx.get(f"{url}/metrics", timeout=30).text, re.M)
    return float(found[1]) if found else 0.0


@contextlib.contextmanager
def vllm(python: str, model: Model) -> Iterator[Engine]:
    """A server with random weights."""
    with tempfile.TemporaryDirectory() as name, (Path(name) / "log").open("w+") as log:
        folder = Path(name) / "model"
        sizes = ["--hidden", str(model.hidden), *(["--layers", str(model.layers)] if model.layers else [])]
        made = [python, str(MAKE_MODEL), str(folder), "--kind", model.kind, *sizes]
        subprocess.run(made, check=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        process = subprocess.Popen(
            [
                *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
                *("--served-model-name", MODEL, "--load-format", "dummy", "--enforce-eager"),
                *("--num-gpu-blocks-override", str(model.blocks), "--max-model-len", "4096"),
                *("--max-num-batched-tokens", str(model.batched_tokens)),
                *("--host", "127.0.0.1", "--port", str(port)),
            ],
            env=os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
            stdout=log,
            stderr=log,
        )
        url = f"http://127.0.0.1:{port}"
        try:
            _until_up(process, url, Path(name) / "log")
            yield Engine(url, model, folder / "config.json")
        except (httpx.TransportError, AssertionError):
            if process.poll() is not None:
                raise RuntimeError(f"vLLM has died:\n{_why(Path(name) / 'log')}") from None
            raise
        finally:
            process.terminate()
            process.wait(60)


def _why(log: Path) -> str:
    """Its first errors: those that come later, while it goes down, follow from them."""
    lines = log.read_text().splitlines()
    return "\n".join([line for line in lines if "ERROR" in line][:60] or lines[-60:])


def _until_up(process: subprocess.Popen[Any], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"vLLM did not start:\n{_why(log)}")
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(1)


@contextlib.contextmanager
def gate(engine: Engine, options: Sequence[str] = ()) -> Iterator[Gateway]:
    """kvgate in front of it, which finds the sizes by itself.

    Of a hybrid it must be told the configuration, which no page shows.
    """
    told: list[str] = []
    if engine.model.is_hybrid:
        told = ["--model-config", str(engine.config)]
        told += ["--max-batched-tokens", str(engine.model.batched_tokens)]
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "kvgate", "serve", "--upstream", engine.url, *told),
            *("--max-wait", "3600", "--count-timeout", "120", "--drain-timeout", "1"),
            *("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", *options),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        found = re.search(r"listening on (\S+?), admin on (\S+?), ", process.stdout.readline())
        if found is None:
            raise RuntimeError("kvgate did not start")
        yield Gateway(found[1], found[2], process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        process.stdout.close()
