"""A real vLLM server on the CPU, without and with the gate: `make test-vllm`.

Needs vLLM in an environment of its own (3.5 GB), named by KVGATE_VLLM_PYTHON.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.vllm

BLOCKS = 64  # as vLLM prints them; one is its null block
PROMPT_TOKENS = 200
OUTPUT_CAP = 1000
STREAMS = 24
START_SECONDS = 300


@dataclass
class Server:
    url: str
    block_size: int
    context: int


@dataclass
class Run:
    finished: int
    preemptions: float
    worst_stall: float
    seconds: float


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def metric(url: str, name: str) -> str:
    text = httpx.get(f"{url}/metrics").text
    return next(line for line in text.splitlines() if line.startswith(name))


def preemptions(url: str) -> float:
    return float(metric(url, "vllm:num_preemptions_total").rsplit(" ", 1)[1])


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    python = os.environ["KVGATE_VLLM_PYTHON"]
    folder = tmp_path_factory.mktemp("vllm")
    subprocess.run(
        [python, str(Path(__file__).with_name("make_model.py")), str(folder / "model")], check=True
    )
    port = free_port()
    # One address for the metrics and nothing from outside: the model is local.
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(python, "-m", "vllm.entrypoints.openai.api_server"),
                *("--model", str(folder / "model"), "--served-model-name", "tiny"),
                *("--load-format", "dummy", "--num-gpu-blocks-override", str(BLOCKS), "--enforce-eager"),
                *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", "4096"),
            ],
            env=environment,
            stdout=log,
            stderr=log,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert process.poll() is None, (folder / "log").read_text()[-4000:]
            assert time.monotonic() < deadline, (folder / "log").read_text()[-4000:]
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(1)
        labels = dict(re.findall(r'(\w+)="([^"]*)"', metric(url, "vllm:cache_config_info")))
        assert labels["num_gpu_blocks"] == str(BLOCKS)
        yield Server(url, int(labels["block_size"]), 4096)
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def gate(vllm: Server) -> Iterator[str]:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "kvgate", "serve", "--upstream", vllm.url, "--engine", "vllm"),
            *("--total-blocks", str(BLOCKS - 1), "--block-size", str(vllm.block_size)),
            *("--context", str(vllm.context), "--max-wait", "300", "--count-timeout", "60"),
            *("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    found = re.search(r"listening on (\S+?),", process.stdout.readline())
    assert found is not None
    try:
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        process.stdout.close()


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "ignore_eos": True, "temperature": 0, **fields}


async def one_stream(client: httpx.AsyncClient, prompt: str) -> tuple[bool, float]:
    """(finished whole, longest gap between two pieces in seconds)."""
    worst, last = 0.0, None
    request = body(prompt=prompt, max_tokens=OUTPUT_CAP, stream=True)
    async with client.stream("POST", "/v1/completions", json=request) as answer:
        assert answer.status_code == 200, await answer.aread()
        finished = False
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            now = time.monotonic()
            worst, last = max(worst, now - (last or now)), now
            finished = finished or line == "data: [DONE]"
    return finished, worst


async def storm(url: str, headers: dict[str, str] | None = None) -> tuple[int, float]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, headers=headers) as client:
        prompts = [f"{n:03d}" + "x" * (PROMPT_TOKENS - 3) for n in range(STREAMS)]
        results = await asyncio.gather(*(one_stream(client, prompt) for prompt in prompts))
    return sum(finished for finished, _ in results), max(worst for _, worst in results)


def run(vllm: Server, url: str) -> Run:
    before, started = preemptions(vllm.url), time.monotonic()
    finished, worst = asyncio.run(storm(url))
    return Run(finished, preemptions(vllm.url) - before, worst, time.monotonic() - started)


def test_the_count_is_the_one_that_vllm_reports(vllm: Server, gate: str) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "tök漢字 🙂"}]
    for path, fields in (
        ("/v1/chat/completions", {"messages": chat}),
        ("/v1/completions", {"prompt": "plain text </s> with a special token"}),
        ("/v1/completions", {"prompt": [1, 2, 3, 4]}),
    ):
        answer = httpx.post(f"{gate}{path}", json=body(**fields, max_tokens=5), timeout=120)
        used = answer.json()["usage"]["prompt_tokens"]
        reserved = int(answer.headers["x-kvgate-reserved-blocks"])

        assert reserved == -(-(used + 5 - 1) // vllm.block_size)


def test_an_unset_cap_of_a_completion_is_vllms_own_16(gate: str) -> None:
    answer = httpx.post(f"{gate}/v1/completions", json=body(prompt="x"), timeout=120)

    assert (answer.headers["x-kvgate-output-cap"], answer.json()["usage"]["completion_tokens"]) == ("16", 16)


def test_a_storm_preempts_without_the_gate_and_not_with_it(
    vllm: Server, gate: str, capsys: pytest.CaptureFixture[str]
) -> None:
    direct = run(vllm, vllm.url)
    gated = run(vllm, gate)

    with capsys.disabled():
        print(json.dumps({"direct": vars(direct), "gated": vars(gated)}, indent=1))
    assert direct.preemptions > 0
    assert (gated.finished, gated.preemptions) == (STREAMS, 0)
