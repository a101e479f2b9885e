"""kvgate's own counts against a real vLLM: its counting endpoint, and the usage that it reports.

`make test-vllm`. The weights are random, the tokenizer and the chat template are Qwen3's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from make_model import config_of
from test_real_vllm import START_SECONDS, free_port

sys.path.append(str(Path(__file__).parents[1] / "tokens"))
from families import directory
from traffic import requests

from kvgate.edge.counting.local_count import count_shape, refuse_own_prompts
from kvgate.tokens import CannotCount, PromptCounter, load
from kvgate.wire.engines.known import ENGINES

pytestmark = pytest.mark.vllm
SEED = 23
REQUESTS = 120
CONTEXT = 32_768
ROUTES = ENGINES["vllm"].routes


@pytest.fixture(scope="module")
def model() -> Path:
    return directory("qwen3")


@pytest.fixture(scope="module")
def counter(model: Path) -> PromptCounter:
    return load(model)


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("qwen")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).symlink_to(model / file)
    config = config_of("dense")
    config |= {"vocab_size": 151_936, "max_position_embeddings": CONTEXT, "eos_token_id": 151_645}
    (folder / "config.json").write_text(json.dumps(config))
    port = free_port()
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(os.environ["KVGATE_VLLM_PYTHON"], "-m", "vllm.entrypoints.openai.api_server"),
                *("--model", str(folder), "--served-model-name", "m", "--load-format", "dummy"),
                *("--enforce-eager", "--host", "127.0.0.1", "--port", str(port)),
                *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
            ],
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert process.poll() is None, (folder / "log").read_text()[-4000:]
            assert time.monotonic() < deadline, (folder / "log").read_text()[-4000:]
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def ours(counter: PromptCounter, path: str, body: dict[str, Any]) -> tuple[int, bool]:
    """(tokens of all prompts, exact), as the gateway with a tokenizer counts them."""
    shape = ROUTES[path.encode()].read(json.dumps(body).encode())
    refuse_own_prompts("vllm", shape, counter)
    counts = count_shape(counter, shape)
    return sum(count.prompt_tokens for count in counts), all(count.is_exact for count in counts)


def test_mixed_chats_count_like_the_counting_endpoint_and_the_usage(url: str, counter: PromptCounter) -> None:
    specials = [*counter.separators, "<|endoftext|>", "<|fim_prefix|>"]
    wrong = []
    with httpx.Client(base_url=url, timeout=120) as client:
        for number, body in enumerate(requests(SEED, REQUESTS, specials, roles_alternate=False)):
            counted, _ = ours(counter, "/v1/chat/completions", body)
            asked = client.post("/tokenize", json=body)
            if asked.status_code == 400 and "continue_final_message" in asked.text:
                continue  # it looks for the final message as sent, and the template strips it
            assert asked.status_code == 200, (number, asked.text)
            truths = [asked.json()["count"]]
            if number % 3 == 0 and counted < CONTEXT:
                answer = client.post("/v1/chat/completions", json=body | {"max_tokens": 1})
                assert answer.status_code == 200, (number, answer.text)
                truths.append(answer.json()["usage"]["prompt_tokens"])
            if set(truths) != {counted}:
                wrong.append((number, counted, truths))

    assert not wrong, f"seed {SEED}"


def test_completions_are_never_under(url: str, counter: PromptCounter) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": "hello world"},
        {"prompt": ["one", "two three", "今天天气"]},
        {"prompt": [1, 2, 3]},
        {"prompt": [[1, 2], [3, 4, 5]]},
        {"prompt": "a<|im_end|>b <|im_start|>", "add_special_tokens": False},
        {"prompt": "x" * 5_000, "n": 2},
        {"prompt": "e\u0301 \u0338 \u200d👩‍👩‍👧", "echo": True},
    ]
    with httpx.Client(base_url=url, timeout=120) as client:
        for body in bodies:
            answer = client.post("/v1/completions", json=body | {"model": "m", "max_tokens": 1})
            assert answer.status_code == 200, answer.text
            truth = answer.json()["usage"]["prompt_tokens"]
            counted, is_exact = ours(counter, "/v1/completions", body)
            assert counted == truth if is_exact else counted >= truth, body


def test_what_the_engine_words_by_itself_is_left_to_it(counter: PromptCounter) -> None:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}

    with pytest.raises(CannotCount):
        ours(counter, "/v1/messages", body)
    with pytest.raises(CannotCount):
        ours(counter, "/v1/responses", {"model": "m", "input": "hello"})
