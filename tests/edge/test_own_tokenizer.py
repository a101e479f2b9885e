"""`--tokenizer` in a running gateway: counts made there, as long as the engine agrees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Stack, payload, request
from small_model import write_model

from kvgate.edge.counting.trust import AGREEMENTS
from kvgate.tokens import PromptCounter, load

CAP = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def counter(model: Path) -> PromptCounter:
    return load(model)


@pytest.fixture
def stack(model: Path) -> Iterator[Stack]:
    started = Stack("--engine", "vllm", "--tokenizer", str(model), total_blocks=65_536, context=32_768)
    yield started
    started.stop()


def body(text: str) -> dict[str, Any]:
    return payload(False, messages=[{"role": "user", "content": text}], max_tokens=CAP)


def tokens_of(counter: PromptCounter, text: str) -> int:
    return counter.count_chat(body(text)).prompt_tokens


async def ask(stack: Stack, text: str, engine_says: int) -> tuple[str | None, int]:
    """(where the count came from, tokens reserved)."""
    answer = await stack.fetch(request(body=body(text), script={"prompt_tokens": engine_says}))
    assert answer.status == 200, answer
    return answer.header("x-kvgate-count-source"), int(answer.header("x-kvgate-reserved-blocks") or 0)


async def agree(stack: Stack, counter: PromptCounter) -> None:
    for times in range(1, AGREEMENTS + 1):
        text = "hello world " * times
        source, _ = await ask(stack, text, tokens_of(counter, text))
        assert source == "engine"


async def test_the_count_is_made_here_once_the_engine_has_agreed(
    stack: Stack, counter: PromptCounter
) -> None:
    await agree(stack, counter)

    tokens = tokens_of(counter, "the lazy dog")
    assert await ask(stack, "the lazy dog", tokens) == ("tokenizer", tokens + CAP - 1)
    counting = stack.pool()["counting"]
    assert counting["sources"] == {"engine": AGREEMENTS, "tokenizer": 1}
    assert counting["engine_calls"] == AGREEMENTS
    assert 'kvgate_counts_total{source="tokenizer",upstream=' in stack.metrics()
    await stack.until(reserved_blocks=0, live=0)


async def test_a_usage_above_the_count_leaves_the_rest_to_the_engine(
    stack: Stack, counter: PromptCounter
) -> None:
    await agree(stack, counter)
    tokens = tokens_of(counter, "the lazy dog")
    await ask(stack, "the lazy dog", tokens + 1)

    assert await ask(stack, "the quick fox", 99) == ("engine", 99 + CAP - 1)
    assert "usage" in stack.pool()["counting"]["distrusted"]


async def test_a_tokenizer_of_another_model_is_never_used(stack: Stack, counter: PromptCounter) -> None:
    for times in range(AGREEMENTS + 2):
        text = "hello " * (times + 1)
        assert (await ask(stack, text, tokens_of(counter, text) + 1))[0] == "engine"


async def test_a_long_prompt_is_counted_beside_the_loop(stack: Stack, counter: PromptCounter) -> None:
    await agree(stack, counter)
    text = "hello world " * 9_000
    tokens = tokens_of(counter, text)

    assert await ask(stack, text, tokens) == ("tokenizer", tokens + CAP - 1)
    assert stack.pool()["counting"]["beside"] == 1
