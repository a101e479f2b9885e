"""Engine faults: whatever the engine does, its client learns the truth and nothing stays taken."""

from __future__ import annotations

import asyncio
import base64
import json

from kvgate.lab.conformance.case import Section, expect
from kvgate.lab.conformance.raw_client import Answer
from kvgate.lab.conformance.setting import Setting
from kvgate.lab.script import ERROR_500

section = Section("Engine faults", 2, ends_idle=True)
BROKEN_OFF = "data: an event\n\ndata: half an ev"
UNAVAILABLE = (500, 502, 503, 504)


def is_error_event(event: bytes) -> bool:
    try:
        page = json.loads(event)
    except ValueError:
        return False
    return isinstance(page, dict) and "error" in page


def seen_broken(answer: Answer) -> None:
    expect(answer.status == 200, f"the head was lost: {answer}")
    broken = not answer.complete or any(map(is_error_event, answer.events))
    expect(broken, "half an answer came as a whole one: a clean end, and no error in it")


async def fault(s: Setting, *, stream: bool = True, **script: object) -> Answer:
    marker = await s.plan(**script)
    return await s.fetch(s.post(s.body(marker, stream=stream)), 8.0)


@section.case(
    "FC-15-no-head",
    "an engine that closes or resets before its answer gives a 5xx",
    reference="BerriAI/litellm#20256",
    expected="a whole answer of 500, 502, 503 or 504, stream or not",
)
async def no_head(s: Setting) -> None:
    for name in ("close_before_headers", "reset_before_headers"):
        for stream in (True, False):
            answer = await fault(s, fault=name, stream=stream)
            expect(answer.status in UNAVAILABLE and answer.complete, f"{name}: {answer}")


@section.case(
    "FC-15-after-head",
    "an engine that dies right after its head is not shown as a whole answer",
    reference="BerriAI/litellm#20256",
    expected="a broken connection or an error in the stream; a 5xx where nothing was passed on yet",
)
async def after_head(s: Setting) -> None:
    for stream in (True, False):
        answer = await fault(s, fault="close_mid", fault_after=0, stream=stream)
        if answer.status not in UNAVAILABLE:
            seen_broken(answer)


@section.case(
    "FC-15-mid-event",
    "an engine that dies inside an event is not shown as a whole answer",
    reference="Neroued/ninfer#137",
    expected="a broken connection or an error event; never a clean end",
)
async def mid_event(s: Setting) -> None:
    piece = BROKEN_OFF.encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    wire = [head + b"%x\r\n%s\r\n" % (len(piece), piece)]
    answer = await fault(s, wire=[base64.b64encode(w).decode() for w in wire], connection_close=True)
    seen_broken(answer)


@section.case(
    "FC-15-mid-chunk",
    "an engine that resets inside a chunk is not shown as a whole answer",
    reference="BerriAI/litellm#20256",
    expected="a broken connection or an error event; never a clean end",
)
async def mid_chunk(s: Setting) -> None:
    answer = await fault(s, fault="reset_mid_chunk", fault_after=2, chunks=6, interval_ms=20)
    seen_broken(answer)


@section.case(
    "FC-15-mid-length",
    "an engine that dies before its content length is reached is not shown as a whole answer",
    reference="BerriAI/litellm#20256",
    expected="a broken connection, or a 5xx where nothing was passed on yet",
)
async def mid_length(s: Setting) -> None:
    answer = await fault(s, fault="close_mid", fault_after=2, chunks=6, interval_ms=20, stream=False)
    if answer.status not in UNAVAILABLE:
        seen_broken(answer)


@section.case(
    "broken-stream-error-event",
    "a stream that the engine breaks off ends with an error event",
    reference="BerriAI/litellm#9035",
    expected='an event `{"error": {...}}` is the last, so that a client can say what happened',
)
async def error_event(s: Setting) -> None:
    answer = await fault(s, fault="close_mid", fault_after=2, chunks=6, interval_ms=20)
    expect(answer.status == 200, f"the head was lost: {answer}")
    last = answer.events[-1] if answer.events else b""
    expect(is_error_event(last), f"the last event is {last[:80]!r}")


@section.case(
    "FC-15-hang",
    "a client that gives up on an engine that hangs, before or in its answer, frees the engine",
    reference="BerriAI/litellm#20256",
    expected="the engine's request is closed within 1 s",
)
async def hang(s: Setting) -> None:
    for name in ("hang_before_headers", "hang_mid"):
        marker = await s.plan(fault=name)
        client = await s.send(s.post(s.body(marker)))
        await s.reached(marker)
        await client.events(1, 0.2)
        client.cut()
        await s.released(marker, f"{name}: the client left")


@section.case(
    "FC-15-mixed",
    "100 engine faults of five kinds, 20 at once, leave nothing behind",
    reference="BerriAI/litellm#20256",
    expected="each is answered or cut within 5 s, and the pool is empty afterwards",
    seconds=20,
)
async def mixed(s: Setting) -> None:
    kinds = ("close_before_headers", "close_mid", "reset_mid_chunk", "502", "reset_before_headers")

    async def one(kind: str) -> None:
        try:
            await fault(s, fault=kind, interval_ms=5, fault_after=2)
        except ConnectionError:
            return  # cut: no answer, but over

    for _ in range(5):
        await asyncio.gather(*(one(kind) for kind in kinds * 4))


@section.case(
    "engine-error-unchanged",
    "the engine's own errors pass byte for byte",
    reference="gpustack/gpustack#929",
    expected="400, 404, 422, 500 and 503 with the engine's body, to the byte",
)
async def errors_unchanged(s: Setting) -> None:
    for status in (400, 404, 422, 500, 503):
        answer = await fault(s, fault=str(status))
        expect(answer.status == status, f"the engine's {status} came as {answer}")
        expect(answer.body == ERROR_500, f"the body of the engine's {status} came as {answer.body[:160]!r}")


@section.case(
    "recovers-after-fault",
    "after the engine broke off, the next request is served at once",
    reference="ai-dynamo/dynamo#10564",
    expected="200 within 2 s of each of five faults",
)
async def recovers(s: Setting) -> None:
    for name in ("close_before_headers", "close_mid", "reset_mid_chunk", "500", "reset_before_headers"):
        await fault(s, fault=name)
        marker = await s.plan()
        answer = await s.fetch(s.post(s.body(marker)), 2.0)
        expect(answer.status == 200, f"after {name}: {answer}")


@section.case(
    "stale-idle-connection",
    "an engine that closes idle connections costs no request",
    reference="RFC 9112 section 9.3.1",
    expected="20 requests, each sent about when the engine closes the connection, all get 200",
)
async def stale(s: Setting) -> None:
    client = await s.connect()
    for turn in range(20):
        marker = await s.plan(close_idle_ms=30)
        client.send(s.post(s.body(marker, stream=False)))
        answer = await client.answer()
        expect(answer.status == 200, f"request {turn + 1} got {answer}")
        if client.closed:
            client = await s.connect()
        await asyncio.sleep(0.025 + 0.0005 * turn)
