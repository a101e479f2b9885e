"""An answer that cannot go on ends in a form that its client can read, and gives back what it held."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from harness import COMPLETIONS, Client, Engine, Response, Stack, payload, request
from whole_pool import WHOLE, held

from kvgate.config import Settings, at
from kvgate.core.records import PoolFacts
from kvgate.edge.gateway import Gateway

LONG = {"chunks": 400, "interval_ms": 50, "prompt_tokens": 10}
TEXT = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'


def error_of(answer: Response) -> dict[str, Any]:
    """The error in the last event, after checking that everything before it is whole."""
    assert answer.complete
    assert b"[DONE]" not in answer.body
    *events, last, rest = answer.body.split(b"\n\n")
    assert rest == b""
    for event in events:
        for line in event.splitlines():
            assert not line.startswith(b"data: ") or json.loads(line[6:])["choices"]
    name, _, data = last.strip().partition(b": ")
    assert name == b"data"
    error: dict[str, Any] = json.loads(data)["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    return error


@pytest.mark.parametrize("fault", ["close_mid", "reset_mid_chunk", "hang_mid"])
@pytest.mark.parametrize("framing", ["chunked", "close"])
async def test_a_stream_that_the_engine_breaks_off_ends_with_an_error_event(
    stack: Stack, fault: str, framing: str
) -> None:
    """An orderly close is the end of an answer that is framed by it, and no break."""
    if (fault, framing) == ("close_mid", "close"):
        return
    for after in range(1, 4):
        script = {"chunks": 6, "fault": fault, "fault_after": after, "framing": framing}
        answer = await stack.fetch(request(script=script))
        error = error_of(answer)
        assert error["code"] == "engine_unavailable"
        assert "engine" in error["message"]
        if framing == "chunked":
            assert answer.body.count(b'"choices"') == after
    await stack.assert_idle()


@pytest.mark.parametrize("fault", ["close_mid", "reset_mid_chunk", "hang_mid"])
async def test_an_answer_without_events_is_cut_where_its_framing_shows_it(stack: Stack, fault: str) -> None:
    answer = await stack.fetch(request(body=payload(False), script={"chunks": 6, "fault": fault}))
    assert (answer.status, answer.complete) == (200, False)
    assert b'"error"' not in answer.body
    await stack.assert_idle()


async def test_an_sdk_raises_the_error_that_ends_its_stream(stack: Stack) -> None:
    script = json.dumps({"chunks": 6, "fault": "reset_mid_chunk", "fault_after": 3})
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{stack.port}/v1", api_key="x", max_retries=0)
    async with client:
        stream = await client.chat.completions.create(
            model="scripted",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=16,
            stream=True,
            extra_headers={"x-script": script},
        )
        events = aiter(stream)
        for _ in range(3):
            await anext(events)
        with pytest.raises(openai.APIError, match="engine broke off") as raised:
            await anext(events)
        assert raised.value.code == "engine_unavailable"
    await stack.assert_idle()


async def test_an_engine_killed_with_20_live_streams_is_told_to_each_and_used_again_when_back() -> None:
    stack = Stack()
    try:
        clients = [await Client.connect(stack.port) for _ in range(20)]
        for client in clients:
            client.send(request(script=LONG))
        await asyncio.gather(*(client.events(2) for client in clients))
        await stack.until(live=20)

        port = stack.engine.port
        stack.engine.kill()

        answers = await asyncio.gather(*(client.response() for client in clients))
        assert {error_of(answer)["code"] for answer in answers} == {"engine_unavailable"}
        await stack.until(live=0, reserved_blocks=0)
        refused = await stack.fetch(request())
        assert (refused.status, refused.code) == (503, "engine_unavailable")
        assert 1 <= int(refused.header("retry-after") or 0) <= 60

        stack.engine = Engine(port)
        # The same client connections serve on: their answers were ended in good form.
        for client in clients:
            client.send(request())
        answers = await asyncio.gather(*(client.response() for client in clients))
        assert {(a.status, a.complete) for a in answers} == {(200, True)}
        for client in clients:
            await client.close()
        await stack.assert_idle()
    finally:
        stack.stop()


async def test_a_drain_that_takes_too_long_ends_streams_with_an_error_event_and_leaves_with_0() -> None:
    stack = Stack("--drain-timeout", "0.5")
    try:
        streams = [await Client.connect(stack.port) for _ in range(5)]
        whole = await Client.connect(stack.port)
        for client in streams:
            client.send(request(script=LONG))
            await client.events(1)
        whole.send(request(body=payload(False), script=LONG))
        await stack.until(live=6)

        stopping = asyncio.create_task(asyncio.to_thread(stack.gateway.stop))

        for client in streams:
            assert error_of(await client.response())["code"] == "draining"
            await asyncio.wait_for(client.closed.wait(), 5)
        refused = await whole.response()
        assert (refused.status, refused.code) == (503, "draining")
        assert 1 <= int(refused.header("retry-after") or 0) <= 60
        assert await stopping == 0
    finally:
        stack.stop()


@pytest.fixture(scope="module")
def slow_engine() -> Iterator[Stack]:
    """Room for one; a cut request is held for longer than the engine's stubbornness."""
    started = Stack("--abort-grace", "5.5", total_blocks=100)
    yield started
    started.stop()


async def test_an_engine_that_goes_on_for_5_s_after_its_client_keeps_the_room(slow_engine: Stack) -> None:
    """FC-26: nobody gets the room while this engine still fills it."""
    script = LONG | {"fault": "ignore_disconnect", "chunks": 100}
    async with held(slow_engine, script) as client:
        client.cut()
        until = time.monotonic() + 15
        while (await asyncio.to_thread(slow_engine.engine.stats))["busy"]:
            assert (await asyncio.to_thread(slow_engine.pool))["reserved_blocks"] == 90
            assert time.monotonic() < until
            await asyncio.sleep(0.1)
    await slow_engine.until(within=15, reserved_blocks=0, live=0)
    await slow_engine.assert_idle()


@contextlib.asynccontextmanager
async def gateway_of(engine: Engine, **settings: Any) -> AsyncIterator[Gateway]:
    wanted: dict[str, Any] = {"upstreams": at(f"http://127.0.0.1:{engine.port}"), "listen_port": 0}
    wanted |= {"abort_grace": 0.05, "drain_timeout": 0.2} | settings
    gateway = Gateway(Settings(**wanted), PoolFacts(total_blocks=100, block_size=1, context=100))
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop()


async def test_an_engine_that_comes_back_smaller_or_larger_is_used_at_its_new_size() -> None:
    """What streams hold stays theirs; those who wait get in when the pool has grown."""
    engine = Engine()
    try:
        async with gateway_of(engine, max_wait=20.0) as gateway:
            stream, waiter = [await Client.connect(gateway.port) for _ in range(2)]
            stream.send(request(body=payload(**WHOLE), script=LONG))
            await stream.events(1)
            waiter.send(request(body=payload(**WHOLE), script={"prompt_tokens": 10}))
            while not gateway.gate.line:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

            gateway.keeper.resize(PoolFacts(total_blocks=50, block_size=1, context=100))
            assert gateway.gate.ledger.reserved_blocks == 90
            refused = await waiter.response()
            assert (refused.status, refused.code) == (413, "kv_capacity_exceeded")

            waiter.send(request(body=payload(max_tokens=20), script={"prompt_tokens": 10}))
            while not gateway.gate.line:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            gateway.keeper.resize(PoolFacts(total_blocks=200, block_size=1, context=100))
            assert (await waiter.response()).status == 200
            assert gateway.gate.ledger.reserved_blocks == 90

            port = engine.port
            engine.kill()
            assert error_of(await stream.response())["code"] == "engine_unavailable"
            engine = Engine(port)
            gateway.keeper.resize(PoolFacts(total_blocks=100, block_size=1, context=100))
            waiter.send(request(body=payload(**WHOLE), script={"prompt_tokens": 10}))
            assert (await waiter.response()).status == 200
            for client in (stream, waiter):
                await client.close()
            assert gateway.gate.ledger.reserved_blocks == 0
    finally:
        engine.kill()


# What a stream carries besides text.


async def test_comments_and_events_without_data_are_passed_on_when_they_come(stack: Stack) -> None:
    raw = b": warming up\n\n" + TEXT + b":\n\nevent: ping\nid: 7\n\n" + TEXT + b"data: [DONE]\n\n"
    script = {"raw": base64.b64encode(raw).decode(), "chunks": 5, "interval_ms": 100}
    client = await Client.connect(stack.port)
    client.send(request(script=script))
    await client.events(1)
    assert client.responses.empty()
    assert client.current.body.startswith(b": warming up\n\n")
    assert (await client.response()).body == raw
    await client.close()


async def test_a_stream_is_never_asked_for_compressed_nor_buffered_by_those_before_us(stack: Stack) -> None:
    await asyncio.to_thread(stack.engine.stats, reset=True)
    for stream in (True, False):
        answer = await stack.fetch(
            request(body=payload(stream), headers="Accept-Encoding: gzip, br\r\n"),
        )
        assert answer.header("x-accel-buffering") == ("no" if stream else None)
    streamed, whole = await asyncio.to_thread(stack.engine.generations_seen)
    assert "accept-encoding" not in dict(streamed["headers"])
    assert dict(whole["headers"])["accept-encoding"] == "gzip, br"


@pytest.fixture(scope="module")
def asked() -> Iterator[Stack]:
    """Before an engine that adds an event when it is asked for usage."""
    started = Stack("--engine", "vllm")
    yield started
    started.stop()


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
@pytest.mark.parametrize("split", [None, *range(12)])
async def test_a_client_that_did_not_ask_for_usage_gets_the_stream_that_it_would_have_got(
    asked: Stack, framing: str, split: int | None
) -> None:
    body = payload(messages=..., prompt=[1, 2, 3])
    script = {"framing": framing, "split": split, "trailers": framing == "chunked"}
    data = request(COMPLETIONS, body, script)
    await asyncio.to_thread(asked.engine.stats, reset=True)
    gated = await asked.fetch(data)
    (seen,) = await asyncio.to_thread(asked.engine.generations_seen, COMPLETIONS)
    assert json.loads(seen["body"])["stream_options"] == {"include_usage": True}
    direct = await fetch_direct(asked, data)
    assert (gated.body, gated.trailers, gated.complete) == (direct.body, direct.trailers, True)
    assert b'"usage"' not in gated.body


@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_usage": True, "x": 1}])
async def test_a_client_that_asked_for_usage_gets_it(asked: Stack, options: dict[str, Any]) -> None:
    data = request(COMPLETIONS, payload(messages=..., prompt=[1, 2, 3], stream_options=options))
    gated, direct = await asked.fetch(data), await fetch_direct(asked, data)
    assert gated.body == direct.body
    assert b'"usage"' in gated.body


async def fetch_direct(stack: Stack, data: bytes) -> Response:
    client = await Client.connect(stack.engine.port)
    client.send(data)
    answer = await client.response()
    await client.close()
    return answer


async def test_use_is_exported_from_the_start_and_above_the_reservation_is_seen(stack: Stack) -> None:
    """FC-44: an engine that reports more than was reserved."""

    def figures() -> dict[str, float]:
        lines = stack.metrics().splitlines()
        return {n: float(v) for n, _, v in (line.rpartition(" ") for line in lines if line[:1] != "#")}

    before = await asyncio.to_thread(figures)
    names = [
        "kvgate_use_above_reservation_total",
        'kvgate_prompt_miscount_total{direction="under"}',
        'kvgate_prompt_miscount_total{direction="over"}',
        "kvgate_used_of_reserved_count",
    ]
    # Within the cap of 16, above it, and prompts of 1 and 5 that the engine counts as 3.
    for ids, chunks in ((3, 4), (3, 40), (1, 4), (5, 4)):
        body = payload(False, messages=..., prompt=[1] * ids)
        script = {"chunks": chunks, "prompt_tokens": 3}
        assert (await stack.fetch(request(COMPLETIONS, body, script))).status == 200
    after = await asyncio.to_thread(figures)
    assert [after[name] - before[name] for name in names] == [1, 1, 1, 4]
