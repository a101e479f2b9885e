"""FC-41, FC-43: one prompt through every API of an engine, in a running gateway.

What is reserved is the same within what a template may add, and never 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from harness import Stack, request

from kvgate.wire.engines.bounds import TEMPLATE_MARGIN

CAP = 50
TEXT = "the quick brown fox jumps over the lazy dog " * 20
CHAT = [{"role": "user", "content": TEXT}]
# Beside the template: what a conversation in JSON has more than its text, one token a byte at most.
OVERHEAD = TEMPLATE_MARGIN + 200

VLLM: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": CAP},
    "/v1/completions": {"prompt": TEXT, "max_tokens": CAP},
    "/v1/responses": {"input": TEXT, "max_output_tokens": CAP},
    "/v1/messages": {"messages": CHAT, "max_tokens": CAP},
    "/v1/chat/completions/batch": {"messages": [CHAT], "max_tokens": CAP},
}
LLAMACPP: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": CAP},
    "/v1/completions": {"prompt": TEXT, "max_tokens": CAP},
    "/v1/responses": {"input": TEXT, "max_output_tokens": CAP},
    "/v1/messages": {"messages": CHAT, "max_tokens": CAP},
    "/completion": {"prompt": TEXT, "n_predict": CAP},
    "/infill": {"input_prefix": TEXT, "input_suffix": "", "n_predict": CAP},
    "/api/chat": {"messages": CHAT, "max_tokens": CAP},
}


@pytest.fixture(scope="module")
def vllm() -> Iterator[Stack]:
    started = Stack("--engine", "vllm", total_blocks=65_536, context=8_192)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def llamacpp() -> Iterator[Stack]:
    started = Stack(total_blocks=65_536, context=8_192)
    yield started
    started.stop()


async def reserved(stack: Stack, path: str, body: dict[str, Any]) -> tuple[int, str | None]:
    answer = await stack.fetch(request(path, {"model": "m"} | body))
    tokens = answer.header("x-kvgate-reserved-blocks")
    assert tokens is not None, (path, answer)
    return int(tokens), answer.header("x-kvgate-count-source")


async def check_all(stack: Stack, bodies: dict[str, dict[str, Any]]) -> None:
    found = {path: await reserved(stack, path, body) for path, body in bodies.items()}

    least = min(tokens for tokens, _ in found.values())
    most = max(tokens for tokens, _ in found.values())
    assert least >= CAP + len(TEXT.split()) - 1, found
    assert most <= least + OVERHEAD, found
    assert all(source in ("engine", "bound") for _, source in found.values()), found


async def test_every_api_of_vllm_reserves_the_same(vllm: Stack) -> None:
    await check_all(vllm, VLLM)


async def test_every_api_of_llamacpp_reserves_the_same(llamacpp: Stack) -> None:
    await check_all(llamacpp, LLAMACPP)


async def test_choices_and_lists_of_prompts_multiply(vllm: Stack) -> None:
    one, _ = await reserved(vllm, "/v1/completions", {"prompt": [1] * 100, "max_tokens": CAP})
    four, _ = await reserved(vllm, "/v1/completions", {"prompt": [1] * 100, "max_tokens": CAP, "n": 4})
    five, _ = await reserved(vllm, "/v1/completions", {"prompt": [1] * 100, "max_tokens": CAP, "best_of": 5})
    lists, source = await reserved(vllm, "/v1/completions", {"prompt": [[1] * 100] * 3, "max_tokens": CAP})

    assert one == 100 + CAP - 1
    assert (four, five, lists) == (4 * one, 5 * one, 3 * one)
    assert source == "request"


async def test_a_conversation_that_the_gate_cannot_see_costs_a_context(vllm: Stack) -> None:
    body = {"input": "go on", "previous_response_id": "resp_1", "max_output_tokens": CAP}

    tokens, source = await reserved(vllm, "/v1/responses", body)

    assert (tokens, source) == (8_192 - 1, "whole_context")
