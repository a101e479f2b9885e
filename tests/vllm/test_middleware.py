"""kvgate inside a real vLLM server on the CPU: `--middleware kvgate.vllm.Middleware` (make test-vllm)."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from test_real_vllm import BLOCKS, STREAMS, Run, body, free_port, metric, preemptions, storm

pytestmark = pytest.mark.vllm

START_SECONDS = 300
KEY = "secret-of-the-test"
SERVER = ("-m", "vllm.entrypoints.openai.api_server", "--model")
COMMAND = (str(Path(__file__).with_name("vllm_command.py")), "serve")  # starts several API servers
# The example takes a model and nothing else; the options of a small one come by the environment.
RUN_EXAMPLE = """
import os, sys
os.environ["TEST_OPTIONS"] = " ".join(sys.argv[3:])
os.execvp("sh", ["sh", sys.argv[1], sys.argv[2]])
"""
EXAMPLE = ("-c", RUN_EXAMPLE, str(Path(__file__).parents[2] / "examples" / "vllm_middleware.sh"))
SOURCES = Path(__file__).parents[2] / "src"


@contextmanager
def server(folder: Path, *options: str, module: Sequence[str] = SERVER, **environment: str) -> Iterator[str]:
    python, port = os.environ["KVGATE_VLLM_PYTHON"], free_port()
    if not (folder / "model").exists():
        subprocess.run(
            [python, str(Path(__file__).with_name("make_model.py")), str(folder / "model")], check=True
        )
    settings = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"} | environment
    settings["PYTHONPATH"] = f"{SOURCES}:{Path(__file__).parent}"
    log_path = folder / f"log-{port}"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [
                *(python, *module, str(folder / "model"), "--served-model-name", "tiny"),
                *("--load-format", "dummy", "--num-gpu-blocks-override", str(BLOCKS), "--enforce-eager"),
                *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", "4096", *options),
            ],
            env=settings,
            stdout=log,
            stderr=log,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert process.poll() is None, log_path.read_text()[-4000:]
            assert time.monotonic() < deadline, log_path.read_text()[-4000:]
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm-middleware")


@pytest.fixture(scope="module")
def gated(folder: Path) -> Iterator[str]:
    options = ("--middleware", "kvgate.vllm.Middleware", "--api-key", KEY)
    with server(folder, *options, KVGATE_MAX_WAIT="300") as url:
        yield url


def post(url: str, path: str, key: str | None = KEY, **fields: object) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.post(f"{url}{path}", json=body(**fields), headers=headers, timeout=120)


def block_size(url: str) -> int:
    return int(metric(url, "vllm:cache_config_info").partition('block_size="')[2].partition('"')[0])


def test_the_count_is_the_servers_own_and_the_cap_is_enforced(gated: str) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "tök漢字 🙂"}]
    size = block_size(gated)
    for path, fields in (
        ("/v1/chat/completions", {"messages": chat}),
        ("/v1/completions", {"prompt": "plain text </s> with a special token"}),
        ("/v1/completions", {"prompt": [1, 2, 3, 4]}),
    ):
        answer = post(gated, path, max_tokens=5, **fields)
        used = answer.json()["usage"]
        assert int(answer.headers["x-kvgate-reserved-blocks"]) == -(-(used["prompt_tokens"] + 4) // size)
        assert (answer.headers["x-kvgate-output-cap"], used["completion_tokens"]) == ("5", 5)


def test_an_unset_cap_of_a_completion_is_vllms_own_16(gated: str) -> None:
    answer = post(gated, "/v1/completions", prompt="x")
    assert (answer.headers["x-kvgate-output-cap"], answer.json()["usage"]["completion_tokens"]) == ("16", 16)


def test_a_request_without_the_key_is_neither_counted_nor_admitted(gated: str) -> None:
    for key in (None, "wrong", KEY + "x"):
        answer = post(gated, "/v1/completions", key=key, prompt="x")
        assert (answer.status_code, answer.json()) == (401, {"error": "Unauthorized"})
        assert "x-kvgate-output-cap" not in answer.headers


def test_what_can_never_fit_and_what_is_not_priced_is_refused(gated: str) -> None:
    never = post(gated, "/v1/completions", prompt="x", max_tokens=4000, n=4)
    assert (never.status_code, never.json()["error"]["code"]) == (413, "kv_capacity_exceeded")
    unpriced = post(gated, "/v1/audio/transcriptions")
    assert (unpriced.status_code, unpriced.json()["error"]["code"]) == (403, "unpriced_endpoint")
    wrong = post(gated, "/v1/completions", prompt="x", max_tokens="many")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "max_tokens")
    assert httpx.get(f"{gated}/health").status_code == 200
    free = post(gated, "/tokenize", key=None, prompt="abc")
    assert free.json()["count"] == 3


def run(url: str, key: str | None) -> Run:
    before, started = preemptions(url), time.monotonic()
    finished, worst = asyncio.run(storm(url, {} if key is None else {"authorization": f"Bearer {key}"}))
    return Run(finished, preemptions(url) - before, worst, time.monotonic() - started)


def test_a_storm_preempts_without_the_middleware_and_not_with_it(
    gated: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inside = run(gated, KEY)
    with server(folder) as url:
        bare = run(url, None)

    with capsys.disabled():
        print(json.dumps({"bare": vars(bare), "middleware": vars(inside)}, indent=1))
    assert bare.preemptions > 0
    assert (inside.finished, inside.preemptions) == (STREAMS, 0)


def test_two_api_servers_each_have_half_of_the_pool(folder: Path) -> None:
    command = ("--api-server-count", "2", "--middleware", "kvgate.vllm.Middleware")
    with server(folder, *command, module=COMMAND) as url:
        # 63 blocks of 128, of which 0.9 of 31 are usable in each server.
        answer = httpx.post(f"{url}/v1/completions", json=body(prompt="x", max_tokens=4000), timeout=120)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "kv_capacity_exceeded")
    assert answer.json()["error"]["usable_tokens"] == 27 * 128


def test_the_example_starts_a_vllm_that_admits(folder: Path, tmp_path: Path) -> None:
    """Its `vllm` is this test's: the same, with a small model's options behind what the example gives."""
    command = tmp_path / "vllm"
    command.write_text(f'#!/bin/sh\nexec "$KVGATE_VLLM_PYTHON" {COMMAND[0]} "$@" $TEST_OPTIONS\n')
    command.chmod(0o755)
    with server(folder, module=EXAMPLE, PATH=f"{tmp_path}:{os.environ['PATH']}") as url:
        answer = httpx.post(f"{url}/v1/completions", json=body(prompt="x", max_tokens=5), timeout=120)
    assert (answer.status_code, answer.headers["x-kvgate-output-cap"]) == (200, "5")


def test_a_model_that_cannot_be_priced_ends_the_server_at_its_start_with_the_reason(folder: Path) -> None:
    started = time.monotonic()
    with pytest.raises(AssertionError) as ended, server(folder, "--middleware", "unknown_model.Middleware"):
        pass
    assert "kvgate cannot tell what a request of this model holds" in str(ended.value)
    assert time.monotonic() - started < START_SECONDS
