"""kvgate's own counts of Gemma 3 against the real llama.cpp that runs it. `make test-tokenizers`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from families import directory
from traffic import requests

from kvgate.edge.counting.local_count import count_shape, refuse_own_prompts, tokenizer_for
from kvgate.edge.embedded import EmbeddedEngine
from kvgate.tokens import CannotCount, PromptCounter
from kvgate.wire.engines.known import ENGINES

pytestmark = pytest.mark.tokenizers
SEED = 31
REQUESTS = 150
CELLS = 8192
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROUTES = ENGINES["llamacpp"].routes


@pytest.fixture(scope="module")
def engine() -> Iterator[httpx.Client]:
    with EmbeddedEngine.start(cells=CELLS, slots=2) as running:
        client = httpx.Client(base_url=running.url, timeout=120)
        yield client
        client.close()


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> PromptCounter:
    """Gemma's tokenizer with the template that llama.cpp takes for a file without one (ChatML)."""
    folder, files = tmp_path_factory.mktemp("gemma"), directory("gemma3")
    (folder / "tokenizer.json").symlink_to(files / "tokenizer.json")
    config = json.loads((files / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": CHATML}))
    counter = tokenizer_for("llamacpp", str(folder))
    assert counter is not None
    return counter


def ours(counter: PromptCounter, path: str, body: dict[str, Any]) -> tuple[int, bool]:
    """(tokens of all prompts, exact), as the gateway with a tokenizer counts them."""
    shape = ROUTES[path.encode()].read(json.dumps(body).encode())
    refuse_own_prompts("llamacpp", shape, counter)
    counts = count_shape(counter, shape)
    return sum(count.prompt_tokens for count in counts), all(count.is_exact for count in counts)


def test_chats_count_like_the_counting_endpoint_and_the_usage(
    engine: httpx.Client, counter: PromptCounter
) -> None:
    wrong, compared = [], 0
    # The text-only model has no token for images; a tokenizer.json of the larger ones has.
    specials = ["<start_of_turn>", "<end_of_turn>", "<bos>", "<eos>", "<unused7>", "<image_soft_token>"]
    for number, body in enumerate(requests(SEED, REQUESTS, specials, roles_alternate=True)):
        try:
            counted, _ = ours(counter, "/v1/chat/completions", body)
        except CannotCount:
            continue
        asked = engine.post("/v1/chat/completions/input_tokens", json=body)
        if asked.status_code >= 400:
            continue
        truths = [asked.json()["input_tokens"]]
        if number % 10 == 0 and counted < 1000:
            answer = engine.post("/v1/chat/completions", json=body | {"max_tokens": 1})
            truths.append(answer.json()["usage"]["prompt_tokens"])
        compared += 1
        if set(truths) != {counted}:
            wrong.append((number, counted, truths))

    assert not wrong, f"seed {SEED}"
    assert compared > REQUESTS / 5


def test_completions_count_like_the_usage(engine: httpx.Client, counter: PromptCounter) -> None:
    with pytest.raises(CannotCount):
        ours(counter, "/v1/completions", {"prompt": "hi <image_soft_token>", "max_tokens": 1})
    for prompt in (
        "hello world",
        "今天天气 <start_of>user\nhi",
        "x" * 600,
        "e\u0301 👩‍👩‍👧",
        " a  b",
    ):
        body = {"prompt": prompt, "max_tokens": 1}
        truth = engine.post("/v1/completions", json=body).json()["usage"]["prompt_tokens"]
        counted, is_exact = ours(counter, "/v1/completions", body)
        assert counted == truth if is_exact else counted >= truth, prompt

    ids = {"prompt": [2, 10, 11, 12], "max_tokens": 1}
    assert engine.post("/v1/completions", json=ids).json()["usage"]["prompt_tokens"] == 4
    assert ours(counter, "/v1/completions", ids) == (4, True)


def test_the_native_completion_is_never_under(engine: httpx.Client, counter: PromptCounter) -> None:
    for prompt in ("hello world", [2, 10, "and text", 12], {"prompt_string": "hello there"}):
        body = {"prompt": prompt, "n_predict": 1, "cache_prompt": False}
        answer = engine.post("/completion", json=body).json()
        counted, _ = ours(counter, "/completion", body)
        assert counted >= answer["tokens_evaluated"] >= 1, prompt


def test_tools_are_left_to_the_engine(counter: PromptCounter) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    body = {"messages": [{"role": "user", "content": "hello"}], "tools": [tool]}

    with pytest.raises(CannotCount):
        ours(counter, "/v1/chat/completions", body)
