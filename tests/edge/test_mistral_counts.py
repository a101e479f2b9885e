"""Chats of Mistral's models are counted here for vLLM, and asked of the other engines."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import mistral_common
import pytest

from kvgate.edge.counting.counted import Counted
from kvgate.edge.counting.local_count import count_shape, refuse_own_prompts, tokenizer_for
from kvgate.edge.counting.off_loop import ProcessCounter
from kvgate.tokens import CannotCount, PromptCounter
from kvgate.tokens.loader import load_files
from kvgate.wire.dialects.anthropic import read_messages
from kvgate.wire.dialects.openai import read_chat, read_completion

CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is in <s> the box?"},
    ],
    "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
}
SHAPE = read_chat(json.dumps(CHAT).encode())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistral")
    source = Path(mistral_common.__file__).parent / "data" / "mistral_instruct_tokenizer_240323.model.v3"
    (folder / "tokenizer.model.v3").symlink_to(source)
    return folder


@pytest.fixture(scope="module")
def counter(model: Path) -> PromptCounter:
    return PromptCounter(load_files(model), accelerators=())


def test_only_vllm_writes_them_with_mistral_common(counter: PromptCounter) -> None:
    refuse_own_prompts("vllm", SHAPE, counter)
    for engine in ("sglang", "llamacpp"):
        with pytest.raises(CannotCount, match=r"with mistral-common|special token"):
            refuse_own_prompts(engine, SHAPE, counter)


def test_other_apis_and_a_missing_library_are_left_to_the_engine(
    model: Path, counter: PromptCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    anthropic = read_messages(json.dumps(messages).encode())
    with pytest.raises(CannotCount, match="rules of its own"):
        refuse_own_prompts("vllm", anthropic, counter)
    monkeypatch.setattr("kvgate.tokens.counter.mistral_chats", lambda *_: None)
    without = tokenizer_for("vllm", str(model))
    assert without is not None
    with pytest.raises(CannotCount, match="with mistral-common"):
        refuse_own_prompts("vllm", SHAPE, without)
    refuse_own_prompts("vllm", read_completion(b'{"prompt": "hello"}'), without)


async def test_a_process_of_its_own_counts_the_same(counter: PromptCounter) -> None:
    loop = asyncio.get_running_loop()
    beside = ProcessCounter(counter.directory, counter.options, loop)
    answered: asyncio.Future[Counted | CannotCount] = loop.create_future()
    beside.count(SHAPE, 60.0, answered.set_result)
    outcome = await answered
    await beside.stop()
    (exact,) = count_shape(counter, SHAPE)
    assert outcome == Counted((exact.prompt_tokens,), "tokenizer")
