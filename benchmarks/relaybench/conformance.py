"""Runs `kvgate conformance` on every gateway, each in front of the scripted engine.

Promise: one JSON file for each in the output folder, as the suite writes it (`kvgate conformance
--compare` makes one table of them); what is absent or does not start is listed in `absent.json`.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from relaybench import client
from relaybench.client import Broken
from relaybench.gateways import Gateway
from relaybench.measure import ready
from relaybench.processes import cores, free_port, running

ENGINE_WITHIN = 20.0
SUITE_WITHIN = 1800.0  # seconds, for one gateway
# The pool that the suite takes the gateway to have; the last option given counts.
KVGATE_POOL = ["--total-blocks", "4096", "--block-size", "1", "--context", "2048", "--safety-fraction", "0.9"]
KVGATE_POOL += ["--max-wait", "2"]
NO_BREAKER = ["--disable-circuit-breaker", "--disable-retries"]
SUITE = [sys.executable, "-c", "from kvgate.cli.conformance import conformance; conformance()"]


def run_all(gateways: list[Gateway], out: Path, only: str | None) -> None:
    """Prints the table of all reports at the end."""
    out.mkdir(parents=True, exist_ok=True)
    absent: dict[str, str] = {}
    files: list[str] = []
    for gateway in gateways:
        if gateway.name in ("kvgate-ids", "python-ids", "bare"):
            continue  # the same gateways as without ids; not a gateway at all
        name = gateway.name
        label, file = f"{name} {gateway.version}", out / f"{name}.json"
        print(f"== {label}", flush=True)
        file.unlink(missing_ok=True)
        if gateway.command is None:
            absent[label] = gateway.absent
            continue
        try:
            run_one(gateway, label, file, only)
            files.append(str(file))
        except Broken as failure:
            absent[label] = f"failed: {failure}"
    (out / "absent.json").write_text(json.dumps(absent, indent=2) + "\n")
    compared = [word for file in files for word in ("--compare", file)]
    if compared:
        subprocess.run([*SUITE, *compared], check=False)
    for label, why in absent.items():
        print(f"{label}: {why}")


def run_one(gateway: Gateway, label: str, file: Path, only: str | None) -> None:
    """Raises `Broken` where there is no report afterwards."""
    assert gateway.command is not None
    with tempfile.TemporaryDirectory() as temporary:
        directory, engine, port = Path(temporary), free_port(), free_port()
        script = [sys.executable, "-m", "kvgate.lab.scripted_engine", "--port", str(engine)]
        command = gateway.command(engine, port, directory)
        words = command.words + (KVGATE_POOL if gateway.name in ("kvgate", "python") else [])
        # With a single engine behind it, a breaker that the fault cases open would fail all the others.
        words = words + (NO_BREAKER if gateway.name.endswith("-router") else [])
        near, far = cores()
        warm = client.request(token_ids=False, stream=False)
        with running(script, near, log=directory / "engine") as scripted:
            asyncio.run(ready(engine, warm, ENGINE_WITHIN, lambda: scripted.poll() is None))
            with running(words, far, log=directory / "log", env=command.env) as child:
                within = command.has_started_within
                asyncio.run(ready(port, warm, within, lambda: child.poll() is None))
                suite = [*SUITE, f"http://127.0.0.1:{port}", "--engine", f"127.0.0.1:{engine}"]
                suite += ["--json", str(file), "--label", label, "--gateway-pid", str(child.pid)]
                suite += ["--only", only] if only else []
                try:
                    done = subprocess.run(suite, timeout=SUITE_WITHIN, check=False)
                except subprocess.TimeoutExpired:
                    raise Broken(f"the suite did not end within {SUITE_WITHIN:g} s") from None
    if not file.exists():
        raise Broken(f"the suite gave no report (exit {done.returncode})")
