"""Counts come from the best source there is, and taking one never holds up the loop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from harness import Engine
from small_model import write_model

from kvgate.edge.counting.counted import Counted, Outcome
from kvgate.edge.counting.counter import Counter
from kvgate.edge.counting.local_count import refuse_own_prompts, tokenizer_for
from kvgate.edge.counting.off_loop import ProcessCounter, ThreadCounter
from kvgate.edge.counting.trust import AGREEMENTS, Trust
from kvgate.edge.observing.loop_lag import LoopLag
from kvgate.edge.relay.pool import EnginePool, EngineUnavailable
from kvgate.tokens import CannotCount, PromptCounter
from kvgate.tokens.loader import load_files
from kvgate.wire.dialects.openai import read_chat, read_completion
from kvgate.wire.dialects.shape import RequestShape
from kvgate.wire.engines.known import ENGINES

# The pause that a long prompt may put into other streams. Work on the loop, in processor time: what
# the machine's other processes take is not ours.
OWN_LAG_MAX = 0.020
DEAD = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def slow(model: Path) -> PromptCounter:
    """Without an accelerator."""
    return PromptCounter(load_files(model), accelerators=())


def counter_for(tokenizer: PromptCounter | None, url: str = DEAD, timeout: float = 30.0) -> Counter:
    loop = asyncio.get_running_loop()
    pool = EnginePool(url, loop, connect_timeout=2.0, idle_timeout=2.0)
    counter = Counter(pool, ENGINES["vllm"], timeout, tokenizer)
    for tokens in range(AGREEMENTS):
        counter.trust.compare(True, Counted((tokens,), "tokenizer"), Counted((tokens,), "engine"))
    return counter


def chat(text: str, **fields: Any) -> RequestShape:
    return read_chat(json.dumps({"messages": [{"role": "user", "content": text}]} | fields).encode())


async def outcome_of(counter: Counter, shape: RequestShape) -> Outcome:
    answered: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    found = counter.begin(shape, [], b"127.0.0.1", answered.set_result)
    if isinstance(found, Counted):
        return found
    async with asyncio.timeout(60):
        return await answered


async def test_a_short_prompt_is_counted_at_once(slow: PromptCounter) -> None:
    counted = counter_for(slow).at_once(chat("hello world"))

    exact = slow.count_chat({"messages": [{"role": "user", "content": "hello world"}]}).prompt_tokens
    assert counted == Counted((exact,), "tokenizer")


async def test_token_ids_are_their_own_count(slow: PromptCounter) -> None:
    shape = read_completion(b'{"prompt": [[1, 2, 3], [4]]}')

    assert counter_for(None).at_once(shape) == Counted((3, 1), "request")
    assert counter_for(slow).at_once(shape) == Counted((3, 1), "request")


@pytest.mark.parametrize("megabytes", [1, 4])
async def test_a_long_prompt_does_not_hold_up_the_loop_without_an_accelerator(
    slow: PromptCounter, megabytes: int
) -> None:
    counter, loop = counter_for(slow), asyncio.get_running_loop()
    text = "the quick brown fox " * (megabytes * 50_000)
    shape = chat(text)
    try:
        assert counter.at_once(shape) is None
        await counter.of(chat("warm up " * 1_000), [], b"")
        lag = LoopLag()
        lag.start(loop)
        counted = await counter.of(shape, [], b"")
        await asyncio.sleep(0.05)
        lag.stop()
    finally:
        await counter.stop()

    assert counted.source == "tokenizer"
    assert counted.prompts is not None
    assert counted.prompts[0] > megabytes * 200_000
    assert lag.longest_own < OWN_LAG_MAX, lag.snapshot()["stalls"]
    assert counter.snapshot()["beside"] == 2


async def test_a_thread_counts_where_the_lock_is_released(model: Path) -> None:
    tokenizer = tokenizer_for("vllm", str(model))
    assert tokenizer is not None
    assert tokenizer.releases_lock, tokenizer.dropped
    beside = ThreadCounter(tokenizer, asyncio.get_running_loop())
    answered: asyncio.Future[Counted | CannotCount] = asyncio.get_running_loop().create_future()

    beside.count(chat("hello " * 100_000), 30.0, answered.set_result)

    exact = tokenizer.count_chat(
        {"messages": [{"role": "user", "content": "hello " * 100_000}]}
    ).prompt_tokens
    assert await answered == Counted((exact,), "tokenizer")
    assert beside.waiting == 0
    await beside.stop()


async def test_a_process_that_dies_is_replaced(slow: PromptCounter) -> None:
    loop = asyncio.get_running_loop()
    beside = ProcessCounter(slow.directory, slow.options, loop)
    shape = chat("hello " * 2_000)

    async def count() -> Counted | CannotCount:
        answered: asyncio.Future[Counted | CannotCount] = loop.create_future()
        beside.count(shape, 30.0, answered.set_result)
        return await answered

    first = await count()
    killed = beside.pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    second, third = await count(), await count()

    assert isinstance(second, CannotCount)
    assert first == third
    assert isinstance(first, Counted)
    assert beside.pid != killed
    assert (beside.lost, beside.waiting) == (1, 0)
    await beside.stop()


async def test_a_count_that_nobody_waits_for_answers_nobody(slow: PromptCounter) -> None:
    loop = asyncio.get_running_loop()
    beside = ProcessCounter(slow.directory, slow.options, loop)
    heard: list[object] = []
    beside.count(chat("hello " * 2_000), 30.0, heard.append).cancel()
    answered: asyncio.Future[Counted | CannotCount] = loop.create_future()
    beside.count(chat("world " * 2_000), 30.0, answered.set_result)

    assert isinstance(await answered, Counted)
    assert heard == []
    await beside.stop()


async def test_what_cannot_be_counted_here_is_asked_of_the_engine_once(slow: PromptCounter) -> None:
    engine = Engine()
    try:
        counter = counter_for(slow, f"http://127.0.0.1:{engine.port}")
        part = {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}
        body = {"messages": [{"role": "user", "content": [part]}]}
        shape = read_chat(json.dumps(body).encode())

        assert counter.at_once(shape) is None
        first = await outcome_of(counter, shape)
        second = counter.begin(shape, [], b"127.0.0.1", pytest.fail)
        other = await outcome_of(counter, read_chat(json.dumps(body | {"seed": 1}).encode()))
    finally:
        engine.kill()

    assert isinstance(first, Counted)
    assert first.source == "engine"
    assert first == second
    assert isinstance(other, Counted)
    assert counter.snapshot()["engine_calls"] == 2


async def test_an_engine_that_is_not_there_is_unavailable() -> None:
    counter = counter_for(None)

    assert isinstance(await outcome_of(counter, chat("hello")), EngineUnavailable)
    assert counter.snapshot()["engine_waiting"] == 0


async def test_a_silent_engine_is_given_up_in_time() -> None:
    accepted = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    counter = counter_for(None, f"http://127.0.0.1:{port}", timeout=0.1)

    outcomes = await asyncio.gather(*(outcome_of(counter, chat(f"hello {n}")) for n in range(20)))

    assert accepted.is_set()
    assert all(isinstance(outcome, EngineUnavailable) for outcome in outcomes)
    assert counter.snapshot()["engine_waiting"] == 0
    server.close()


async def test_a_cancelled_call_makes_room_for_the_next() -> None:
    engine = Engine()
    try:
        counter = counter_for(None, f"http://127.0.0.1:{engine.port}")
        heard: list[Outcome] = []
        running = [counter.begin(chat(f"hello {n}"), [], b"", heard.append) for n in range(12)]
        for counting in running:
            assert not isinstance(counting, Counted)
            counting.cancel()
        outcome = await outcome_of(counter, chat("hello"))
    finally:
        engine.kill()

    assert isinstance(outcome, Counted)
    assert heard == []


def test_chats_that_an_engine_words_by_itself_are_not_counted_here(slow: PromptCounter) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    refuse_own_prompts("llamacpp", chat("hello"), slow)
    refuse_own_prompts("vllm", chat("hello", tools=[tool]), slow)
    refuse_own_prompts("generic", read_completion(b'{"prompt": "hello"}'), slow)
    for engine, shape in (
        ("llamacpp", chat("hello", tools=[tool])),
        ("llamacpp", chat("hello", response_format={"type": "json_object"})),
        ("generic", chat("hello")),
    ):
        with pytest.raises(CannotCount):
            refuse_own_prompts(engine, shape, slow)


def test_a_tokenizer_is_believed_when_it_has_agreed_with_the_engine() -> None:
    trust = Trust(can_ask=True)

    for tokens in range(AGREEMENTS):
        for _ in range(5):  # the same request again shows nothing new
            assert not trust.holds(is_chat=True)
            trust.compare(True, Counted((tokens,), "tokenizer"), Counted((tokens,), "engine"))
            if tokens == AGREEMENTS - 1:
                break

    assert trust.holds(is_chat=True)
    assert not trust.holds(is_chat=False)
    assert Trust(can_ask=False).holds(is_chat=False)


@pytest.mark.parametrize("ours", [6, 8])
def test_a_tokenizer_that_differs_is_not_believed_again(ours: int) -> None:
    trust = Trust(can_ask=True)
    trust.compare(False, Counted((ours,), "tokenizer"), Counted((7,), "engine"))
    for tokens in range(AGREEMENTS):
        trust.compare(False, Counted((tokens,), "tokenizer"), Counted((tokens,), "engine"))

    assert trust.is_lost(is_chat=False)
    assert not trust.holds(is_chat=False)
    assert "--tokenizer" in trust.why


def test_a_usage_above_the_count_ends_the_belief_and_one_below_does_not() -> None:
    trust = Trust(can_ask=False)
    trust.reported("tokenizer", 10, 9)
    trust.reported("engine", 10, 11)
    assert trust.holds(is_chat=True)

    trust.reported("tokenizer", 10, 11)

    assert not trust.holds(is_chat=True)
    assert "usage" in trust.why
