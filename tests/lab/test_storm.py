"""The storm on the real llama.cpp: streams die without the gate and none dies with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvgate.config import Settings, at
from kvgate.edge.embedded import EmbeddedEngine
from kvgate.edge.gateway import Gateway
from kvgate.lab.sse_client import Answer
from kvgate.lab.storm import Outcome, StormResult, Wanted, retry_after, storm
from kvgate.lab.tiny_gguf import write_tiny_gguf

STORM = [Wanted(f"story {n}", None if n % 4 == 3 else 200) for n in range(8)]
EVENT = b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":null}]}\n\n'
FINISH = b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\n'
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def engine(model: Path) -> Iterator[EmbeddedEngine]:
    with EmbeddedEngine.start(cells=1024, slots=8, model=model) as running:
        yield running


async def through_gate(engine: EmbeddedEngine, streams: list[Wanted]) -> StormResult:
    settings = Settings(
        upstreams=at(engine.url), listen_port=0, default_output_cap=200, max_output_cap=200, max_wait=60.0
    )
    gateway = Gateway(settings, engine.facts(0.9))
    await gateway.start()
    try:
        result = await storm(f"http://127.0.0.1:{gateway.port}", streams)
        assert gateway.snapshot()["pools"][0]["reserved_blocks"] == 0
        return result
    finally:
        await gateway.stop()


async def test_without_the_gate_every_running_stream_dies(engine: EmbeddedEngine) -> None:
    result = await storm(engine.url, STORM)
    assert result.died == len(STORM)
    assert {stream.detail for stream in result.streams} == {"Context size has been exceeded."}
    assert result.tokens_thrown_away > 0
    assert result.tokens_whole == 0


async def test_through_the_gate_every_stream_finishes_whole(engine: EmbeddedEngine) -> None:
    # Three times: cells that idle slots still remember must not count against newcomers.
    for _ in range(3):
        result = await through_gate(engine, STORM)
        assert [stream.outcome for stream in result.streams] == [Outcome.FINISHED] * len(STORM)
        assert [stream.tokens for stream in result.streams] == [200] * len(STORM)


async def test_an_engine_that_just_lost_its_streams_serves_the_gate(engine: EmbeddedEngine) -> None:
    assert (await storm(engine.url, STORM)).died == len(STORM)
    assert (await through_gate(engine, STORM)).finished == len(STORM)


async def storm_on_script(
    *answers: bytes, patience: float = 30.0, progress: Callable[[StormResult], None] | None = None
) -> StormResult:
    """A storm of one stream on a server that gives one of `answers` to each connection, then closes."""
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(left.pop(0))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        result = await storm(
            f"http://127.0.0.1:{port}", [Wanted("hello")], patience=patience, progress=progress
        )
    assert not left
    return result


def framed(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


def refusal(*headers: bytes, status: bytes = b"429 Too Many Requests") -> bytes:
    body = b'{"error": {"message": "full"}}'
    lines = [b"HTTP/1.1 " + status, b"content-length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def test_a_refused_client_comes_back_when_it_was_told_to() -> None:
    result = await storm_on_script(
        refusal(b"Retry-After: 60", b"retry-after-ms: 20"), framed(EVENT * 3 + FINISH + b"data: [DONE]\n\n")
    )
    assert (result.finished, result.refusals, result.retries, result.tokens_whole) == (1, 1, 1, 3)


@pytest.mark.parametrize(
    "answer",
    [
        refusal(status=b"413 Payload Too Large"),
        refusal(b"x-should-retry: false", b"Retry-After: 1"),
        refusal(b"Retry-After: 60"),  # beyond the patience of this test
    ],
)
async def test_a_client_that_cannot_succeed_is_refused(answer: bytes) -> None:
    result = await storm_on_script(answer, patience=5.0)
    assert (result.refused, result.refusals, result.retries) == (1, 1, 0)
    assert "full" in result.streams[0].detail


@pytest.mark.parametrize(
    "answer",
    [
        framed(EVENT * 2 + b'data: {"error": {"message": "no cells"}}\n\n'),
        framed(EVENT * 2 + FINISH),  # no [DONE]
        framed(EVENT * 2 + b"data: [DONE]\n\n"),  # no finish reason
        framed(EVENT * 2)[:-5],  # cut before the last chunk
        framed(EVENT * 2 + b"data: {half an ev\n\n"),
    ],
)
async def test_an_answer_that_is_not_whole_died_and_its_tokens_are_thrown_away(answer: bytes) -> None:
    result = await storm_on_script(answer)
    assert (result.died, result.tokens_thrown_away, result.tokens_whole) == (1, 2, 0)


async def test_an_engine_error_before_the_first_token_is_a_death() -> None:
    result = await storm_on_script(refusal(status=b"500 Internal Server Error"))
    assert (result.died, result.tokens_thrown_away) == (1, 0)


async def test_progress_sees_the_end() -> None:
    seen: list[int] = []
    done = framed(EVENT + FINISH + b"data: [DONE]\n\n")
    await storm_on_script(done, progress=lambda result: seen.append(result.finished))
    assert seen[-1] == 1


def test_milliseconds_come_before_seconds_and_nonsense_is_no_invitation() -> None:
    assert retry_after(Answer(429, {"retry-after-ms": "1500", "retry-after": "9"})) == 1.5
    assert retry_after(Answer(429, {"retry-after": "9"})) == 9.0
    assert retry_after(Answer(429, {"retry-after": "soon"})) is None
    assert retry_after(Answer(429, {"retry-after": "9", "x-should-retry": "false"})) is None
