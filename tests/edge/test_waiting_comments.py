"""A stream that waits gets signs of life where the operator wants them, and then its whole answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from harness import Client, Response, Stack, payload, request
from whole_pool import WHOLE, held

from kvgate.core.records import Reason, Refused
from kvgate.edge.relay.late_answer import event_of
from kvgate.edge.relay.own_answers import refusal_event
from kvgate.wire.dialects.openai import read_chat
from kvgate.wire.refusal import Dialect, render
from kvgate.wire.routes import Route

HELD = {"chunks": 2000, "interval_ms": 50, "prompt_tokens": 10}
FITS = {"prompt_tokens": 10}
COMMENT = b": waiting\n\n"


def started(*options: str) -> Stack:
    wanted = {"--abort-grace": "0.05", "--max-wait": "60", "--waiting-comments": "0.02"}
    wanted |= dict(zip(options[::2], options[1::2], strict=True))
    return Stack(*(word for pair in wanted.items() for word in pair), total_blocks=100)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    running = started()
    yield running
    running.stop()


@asynccontextmanager
async def waiting(stack: Stack, data: bytes, comments: int = 3) -> AsyncIterator[tuple[Client, Client]]:
    """The stream that holds the whole pool, and a client that has had so many comments in the meantime."""
    async with held(stack, HELD) as holder:
        client = await Client.connect(stack.port)
        client.send(data)
        try:
            await commented(client, comments)
            yield holder, client
        finally:
            client.cut()


async def commented(client: Client, number: int) -> None:
    async with asyncio.timeout(10):
        while client.current.body.count(COMMENT) < number:
            assert client.responses.empty(), "answered instead"
            client.news.clear()
            await client.news.wait()


def after_comments(answer: Response) -> bytes:
    body = answer.body
    while body.startswith(COMMENT):
        body = body[len(COMMENT) :]
    assert COMMENT not in body
    return body


def error_of(answer: Response) -> dict[str, Any]:
    """The one event of an answer that has nothing else after its comments."""
    event = after_comments(answer)
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    assert (answer.status, answer.complete) == (200, True)
    found: dict[str, Any] = json.loads(event[6:])
    return found


@pytest.mark.parametrize(
    "script",
    [
        {},
        {"framing": "length"},
        {"framing": "close"},
        {"trailers": True},
        {"split": 7, "chunks": 30},
        {"chunk_bytes": 20_000},
    ],
)
async def test_comments_come_while_waiting_and_then_the_whole_answer(
    stack: Stack, script: dict[str, Any]
) -> None:
    data = request(body=payload(**WHOLE), script=FITS | script)
    plain = await stack.fetch(data)
    async with waiting(stack, data) as (holder, client):
        assert client.current.status == 200
        assert client.current.header("content-type") == "text/event-stream; charset=utf-8"
        holder.cut()
        answer = await client.response()
        assert (answer.status, answer.complete) == (200, True)
        assert answer.body.count(COMMENT) >= 3
        assert after_comments(answer) == plain.body
        # The connection lives on.
        client.send(data)
        again = await client.response()
        assert (again.body, again.header("x-kvgate-output-cap")) == (plain.body, "81")
    await stack.assert_idle()


async def test_the_gates_own_usage_event_is_taken_out_all_the_same() -> None:
    stack = started("--engine", "vllm")
    try:
        data = request(body=payload(**WHOLE), script=FITS)
        plain = await stack.fetch(data)
        async with waiting(stack, data) as (holder, client):
            holder.cut()
            answer = await client.response()
            assert b'"usage"' not in answer.body
            assert after_comments(answer) == plain.body
        assert "kvgate_used_of_reserved_count 2.0" in await asyncio.to_thread(stack.metrics)
        await stack.assert_idle()
    finally:
        stack.stop()


async def test_a_refusal_after_the_wait_is_an_error_event() -> None:
    # Its forecast is good, so that it waits; then the holder stays.
    stack = started("--max-wait", "1")
    try:
        async with waiting(stack, request(body=payload(**WHOLE), script=FITS), 1) as (_, client):
            told = error_of(await client.response())
            assert told["error"]["code"] == "queue_timeout"
            assert told["error"]["needed_tokens"] == 90
            assert 1 <= told["retry_after_seconds"] <= 60
            # In good form, so that the connection can be used again: now in silence and with a status.
            client.send(request(body=payload(False, **WHOLE), script=FITS))
            assert (await client.response()).status == 429
        await stack.assert_idle()
        assert 'kvgate_refusals_total{reason="queue_timeout"} 2.0' in await asyncio.to_thread(stack.metrics)
    finally:
        stack.stop()


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ({"fault": "500"}, 500),
        ({"fault": "close_before_headers"}, "engine_unavailable"),
        ({"headers": [["content-encoding", "zstd"]]}, "engine_error"),
    ],
)
async def test_the_engines_error_after_the_wait_is_an_error_event(
    stack: Stack, script: dict[str, Any], code: object
) -> None:
    async with waiting(stack, request(body=payload(**WHOLE), script=FITS | script)) as (holder, client):
        holder.cut()
        told = error_of(await client.response())
        assert told["error"]["code"] == code
    await stack.assert_idle()


async def test_an_engine_that_is_gone_when_there_is_room_is_told_in_an_event() -> None:
    stack = started()
    try:
        async with waiting(stack, request(body=payload(**WHOLE), script=FITS)) as (_, client):
            stack.engine.kill()
            told = error_of(await client.response())
            assert told["error"]["code"] == "engine_unavailable"
            assert told["retry_after_seconds"] >= 1
            await stack.until(live=0, reserved_blocks=0, waiting=0)
    finally:
        stack.stop()


async def test_an_answer_that_breaks_off_after_the_wait_ends_like_any_other(stack: Stack) -> None:
    script = FITS | {"chunks": 6, "fault": "close_mid", "fault_after": 3}
    async with waiting(stack, request(body=payload(**WHOLE), script=script)) as (holder, client):
        holder.cut()
        answer = await client.response()
        assert (answer.status, answer.complete) == (200, True)
        *events, last, end = after_comments(answer).split(b"\n\n")
        assert (len(events), end) == (3, b"")
        assert json.loads(last.strip()[6:])["error"]["code"] == "engine_unavailable"
    await stack.assert_idle()


async def test_a_client_that_leaves_while_waiting_leaves_nothing(stack: Stack) -> None:
    seen = len(stack.engine.generations_seen())
    async with waiting(stack, request(body=payload(**WHOLE), script=FITS)) as (_, client):
        await stack.until(waiting=1)
        client.cut()
        await stack.until(waiting=0, live=1)
        status = await asyncio.to_thread(stack.status)
        assert (status["client_connections"], status["body_bytes_held"]) == (1, 0)
    assert len(stack.engine.generations_seen()) == seen + 1
    await stack.assert_idle()


async def test_a_body_is_held_until_the_answer_begins_and_not_only_until_a_comment(stack: Stack) -> None:
    data = request(body=payload(**WHOLE), script=FITS)
    async with waiting(stack, data) as (holder, client):
        body = data.partition(b"\r\n\r\n")[2]
        assert (await asyncio.to_thread(stack.status))["body_bytes_held"] == len(body)
        holder.cut()
        assert (await client.response()).complete
        assert (await asyncio.to_thread(stack.status))["body_bytes_held"] == 0
    await stack.assert_idle()


async def test_who_waits_when_the_gateway_stops_is_told_in_an_event() -> None:
    stack = started("--drain-timeout", "0.1")
    try:
        async with waiting(stack, request(body=payload(**WHOLE), script=FITS)) as (_, client):
            stopping = asyncio.create_task(asyncio.to_thread(stack.gateway.stop))
            told = error_of(await client.response())
            assert told["error"]["code"] == "draining"
            assert await stopping == 0
    finally:
        stack.stop()


@pytest.mark.parametrize(
    ("options", "data"),
    [
        (("--waiting-comments", "0"), request(body=payload(**WHOLE), script=FITS)),
        ((), request(body=payload(False, **WHOLE), script=FITS)),
        ((), request(body=payload(**WHOLE), script=FITS, version="1.0")),
    ],
    ids=["off, as by default", "no stream", "HTTP/1.0"],
)
async def test_everybody_else_waits_in_silence(options: tuple[str, ...], data: bytes) -> None:
    stack = started("--max-wait", "1", *options)
    try:
        async with held(stack, HELD):
            client = await Client.connect(stack.port)
            client.send(data)
            await stack.until(waiting=1)
            answer = await client.response()
            assert (answer.status, answer.code) == (429, "queue_timeout")
            assert client.received.startswith(b"HTTP/1.1 429 ")
            client.cut()
        await stack.assert_idle()
    finally:
        stack.stop()


async def test_the_openai_library_reads_the_stream_and_raises_the_error(stack: Stack) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{stack.port}/v1", api_key="x", max_retries=0
    ) as client:

        async def texts(script: dict[str, Any]) -> list[str]:
            stream = await client.chat.completions.create(
                model="scripted",
                messages=[{"role": "user", "content": "hello"}],
                max_tokens=81,
                stream=True,
                extra_headers={"x-script": json.dumps(FITS | script)},
            )
            # The head is there: the first comment has come.
            holder.cut()
            return [each.choices[0].delta.content or "" async for each in stream]

        async with held(stack, HELD) as holder:
            assert len(await texts({"chunks": 4})) == 5
        async with held(stack, HELD) as holder:
            with pytest.raises(openai.APIError, match="scripted failure"):
                await texts({"fault": "500"})
    await stack.assert_idle()


@pytest.mark.parametrize(
    ("status", "body", "dialect", "event"),
    [
        (
            400,
            b'{"error": {"message": "no",\n "code": 7}}',
            "openai",
            b'data: {"error": {"message": "no", "code": 7}}',
        ),
        (400, b'{"object": "error", "message": "no"}', "openai", b'"message": "no", "type": "server_error"'),
        (502, b"<html>bad\n\ngateway</html>", "openai", b'"message": "<html>bad\\n\\ngateway</html>"'),
        (503, b"", "openai", b"answered with status 503"),
        (200, b'{"choices": []}', "openai", b"answered with status 200"),
        (400, b"\xff[", "tgi", b'"error_type": "generation"'),
        (
            529,
            b'{"type": "error", "error": {"type": "overloaded_error"}}',
            "anthropic",
            b"event: error\ndata: {",
        ),
    ],
)
def test_whatever_the_engine_said_becomes_one_event(
    status: int, body: bytes, dialect: str, event: bytes
) -> None:
    made = event_of(status, body, Dialect(dialect))
    assert event in made
    assert made.endswith(b"\n\n")
    (line,) = [line for line in made.split(b"\n") if line.startswith(b"data: ")]
    assert json.loads(line[6:])["error"]


def test_a_refusal_is_an_event_in_the_shape_of_the_clients_api() -> None:
    refused = Refused(Reason.QUEUE_TIMEOUT, retry_after=3.2, detail="No room came.")
    route = Route(read_chat, Dialect.ANTHROPIC, "max_tokens")
    written = refusal_event(refused, busy_status=529, route=route)
    body = render(refused, dialect=Dialect.ANTHROPIC, busy_status=529)[2]
    event = b"event: error\ndata: " + body + b"\n\n"
    assert written == b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event)
    assert json.loads(body)["retry_after_seconds"] == 4
