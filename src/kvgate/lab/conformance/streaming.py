"""Streaming: what the engine streams arrives when it was sent, and as it was sent."""

from __future__ import annotations

import asyncio
import base64
import json
import time

from kvgate.lab.conformance.case import Section, expect
from kvgate.lab.conformance.raw_client import Answer
from kvgate.lab.conformance.setting import Setting

section = Section("Streaming", 6)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n%s\r\n"
DONE = b"data: [DONE]\n\n"
MIB = 1024 * 1024


def event(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    shown = {"id": "scripted-1", "object": "chat.completion.chunk", "created": 1, "model": "scripted"}
    return b"data: " + json.dumps(shown | {"choices": [choice]}, ensure_ascii=False).encode() + b"\n\n"


def chunk(piece: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(piece), piece)


def stream_of(*pieces: bytes, head_lines: bytes = b"") -> list[str]:
    """A script's `wire`: the head with the first piece, then each piece in a chunk of its own."""
    first, *others = [chunk(piece) for piece in pieces]
    wire = [HEAD % head_lines + first, *others, b"0\r\n\r\n"]
    return [base64.b64encode(piece).decode() for piece in wire]


async def streamed(s: Setting, *pieces: bytes, lines: str = "", interval_ms: float = 0.0) -> Answer:
    marker = await s.plan(wire=stream_of(*pieces), interval_ms=interval_ms)
    answer = await s.fetch(s.post(s.body(marker), lines=lines))
    expect(answer.status == 200 and answer.complete, f"the stream ended as {answer}")
    return answer


async def unchanged(s: Setting, *pieces: bytes, interval_ms: float = 0.0) -> None:
    answer = await streamed(s, *pieces, interval_ms=interval_ms)
    sent = b"".join(pieces)
    at = next((i for i, (a, b) in enumerate(zip(sent, answer.body, strict=False)) if a != b), None)
    where = min(len(sent), len(answer.body)) if at is None else at
    expect(
        answer.body == sent,
        f"byte {where} of {len(sent)}: sent {sent[where : where + 40]!r}, "
        f"got {answer.body[where : where + 40]!r}",
    )


@section.case(
    "FC-48",
    "chunks arrive when they are sent, each by itself",
    reference="dstackai/dstack#4269",
    expected="10 chunks of 247 bytes, 100 ms apart: 10 reads, none of them with two chunks",
)
async def not_buffered(s: Setting) -> None:
    pieces = [event(f"{i:03d}" + "x" * 100)[:-2].ljust(245, b" ") + b"\n\n" for i in range(10)]
    answer = await streamed(s, *pieces, DONE, interval_ms=100)
    reads: list[float] = []
    for moment, _ in answer.pieces:
        if not reads or moment - reads[-1] > 0.05:
            reads.append(moment)
    expect(len(reads) >= 10, f"10 chunks arrived in {len(reads)} clumps")
    took = answer.pieces[-1][0] - answer.pieces[0][0]
    expect(took > 0.85, f"what was sent over 1 s arrived within {took:.2f} s")


@section.case(
    "first-event-at-once",
    "the first event is passed on though nothing follows it",
    reference="BerriAI/litellm#29557",
    expected="it is there within 0.5 s of the engine sending it",
)
async def first_event(s: Setting) -> None:
    marker = await s.plan(wire=stream_of(event("a"), event("b"), DONE), interval_ms=1500)
    client = await s.send(s.post(s.body(marker)))
    await s.reached(marker)
    expect(await client.events(1, 0.5), "the first event was not there after 0.5 s")


@section.case(
    "head-at-once",
    "the head is passed on though no event has come",
    reference="openclaw/openclaw#70739",
    expected="the status and the headers are there within 0.5 s of the engine sending them",
)
async def head_at_once(s: Setting) -> None:
    wire = [HEAD % b"", chunk(event("a")), chunk(DONE) + b"0\r\n\r\n"]
    marker = await s.plan(wire=[base64.b64encode(w).decode() for w in wire], interval_ms=1500)
    client = await s.send(s.post(s.body(marker)))
    await s.reached(marker)
    expect(await client.head(0.5), "no head after 0.5 s")


@section.case(
    "FC-49",
    "a silent prefill of 4 s is not cut off",
    reference="BerriAI/litellm#34374",
    expected="the stream comes whole; comments may fill the silence",
)
async def silent_prefill(s: Setting) -> None:
    marker = await s.plan(first_delay_ms=4000)
    answer = await s.fetch(s.post(s.body(marker)), 8.0)
    expect(answer.status == 200 and answer.complete, f"got {answer}")
    expect(answer.events[-1:] == [b"[DONE]"], "the stream did not come to its end")


@section.case(
    "comments",
    "comments and keep-alives pass unchanged",
    reference="antirez/ds4#151",
    expected="every byte, `: keep-alive` lines and empty events included",
)
async def comments(s: Setting) -> None:
    await unchanged(
        s, b": keep-alive\n\n", event("a"), b":\n\n", b": ping 1\n\n", event("b"), DONE, interval_ms=10
    )


@section.case(
    "other-fields",
    "event names, ids, retry fields, CRLF line ends and odd spacing pass unchanged",
    reference="the HTML standard, section 9.2.6",
    expected="every byte",
)
async def other_fields(s: Setting) -> None:
    await unchanged(
        s,
        b"event: message\nid: 7\nretry: 1000\n" + event("a"),
        event("b").replace(b"\n", b"\r\n"),
        b"data:" + event("c").removeprefix(b"data: "),
        b'data: {\ndata:   "choices": []}\n\n',
        DONE,
        interval_ms=5,
    )


@section.case(
    "split-characters",
    "characters and events cut anywhere between writes arrive whole",
    reference="ggml-org/llama.cpp#20872",
    expected="every byte, where each is sent by itself",
)
async def split_characters(s: Setting) -> None:
    data = event("tök漢字😀") + DONE
    await unchanged(s, *(data[i : i + 1] for i in range(len(data))), interval_ms=1)


@section.case(
    "events-joined",
    "several events in one write, and an event over several, arrive unchanged",
    reference="confidential-dot-ai/c8s#140",
    expected="every byte",
)
async def events_joined(s: Setting) -> None:
    data = b"".join(event(f"token {i}") for i in range(50)) + DONE
    await unchanged(s, data[:3000], data[3000:3010], data[3010:], interval_ms=20)


@section.case(
    "long-event",
    "an event of 1 MB in one line arrives whole",
    reference="BerriAI/litellm#28384",
    expected="every byte",
)
async def long_event(s: Setting) -> None:
    await unchanged(s, event("x" * MIB), event("after"), DONE)


@section.case(
    "many-events",
    "2,000 events without a pause arrive in order",
    reference="mostlygeek/llama-swap#236",
    expected="every byte",
)
async def many_events(s: Setting) -> None:
    whole = b"".join(event(f"{i}") for i in range(2000))
    await unchanged(s, whole, DONE)


@section.case(
    "x-accel-buffering",
    "proxies in front are told not to buffer",
    reference="ChronoAIProject/NyxID#1206",
    expected="`X-Accel-Buffering: no`, once, though the engine said yes",
)
async def accel_buffering(s: Setting) -> None:
    marker = await s.plan(wire=stream_of(event("a"), DONE, head_lines=b"x-accel-buffering: yes\r\n"))
    answer = await s.fetch(s.post(s.body(marker)))
    values = [value.lower() for name, value in answer.headers if name == "x-accel-buffering"]
    expect(values == ["no"], f"x-accel-buffering is {values or 'absent'}")


@section.case(
    "no-compression",
    "an event stream is not compressed",
    reference="mostlygeek/llama-swap#236",
    expected="no Content-Encoding, though the client offers gzip, br and zstd",
)
async def no_compression(s: Setting) -> None:
    answer = await streamed(s, event("a" * 2000), DONE, lines="Accept-Encoding: gzip, br, zstd\r\n")
    expect(answer.header("content-encoding") in (None, "identity"), str(answer.header("content-encoding")))
    kind = answer.header("content-type") or "absent"
    expect(kind.startswith("text/event-stream"), f"content-type is {kind}")


def usages(answer: Answer) -> list[object]:
    pages = [json.loads(e) for e in answer.events if e != b"[DONE]"]
    return [p["usage"] for p in pages if p.get("usage") is not None]


@section.case(
    "usage-honoured",
    "a client that asks for usage in its stream gets it",
    reference="envoyproxy/ai-gateway#2394",
    expected="one event with `usage`, before [DONE]",
)
async def usage_honoured(s: Setting) -> None:
    marker = await s.plan(chunks=3)
    body = s.body(marker, stream_options={"include_usage": True})
    answer = await s.fetch(s.post(body))
    expect(answer.status == 200, f"got {answer}")
    expect(len(usages(answer)) == 1, f"{len(usages(answer))} events with usage")
    expect(answer.events[-1] == b"[DONE]", "the last event is not [DONE]")


@section.case(
    "usage-not-leaked",
    "a client that does not ask for usage gets no event for it",
    reference="api7/aisix#688",
    expected="the events of the answer and [DONE], nothing else",
)
async def usage_not_leaked(s: Setting) -> None:
    for options in (..., {"include_usage": False}, None):
        marker = await s.plan(chunks=3, interval_ms=10)
        answer = await s.fetch(s.post(s.body(marker, stream_options=options)))
        expect(answer.status == 200, f"stream_options {options}: {answer}")
        expect(not usages(answer), f"stream_options {options}: usage {usages(answer)}")
        empty = [e for e in answer.events if e != b"[DONE]" and not json.loads(e).get("choices")]
        expect(not empty, f"stream_options {options}: an event without choices: {empty[:1]}")
        expect(len(answer.events) == 5, f"stream_options {options}: {len(answer.events)} events instead of 5")


@section.case(
    "error-event-passes",
    "an error that the engine puts into its stream passes unchanged",
    reference="unslothai/unsloth#10301",
    expected="the engine's error event, byte for byte, and the end",
)
async def engines_error_event(s: Setting) -> None:
    error = (
        b'data: {"error":{"code":500,"message":"Context size has been exceeded.","type":"server_error"}}\n\n'
    )
    await unchanged(s, event("a"), error, interval_ms=10)


@section.case(
    "until-close",
    "a stream that ends with the engine's connection ends whole",
    reference="RFC 9112 section 6.3",
    expected="every byte, and a proper end",
)
async def until_close(s: Setting) -> None:
    marker = await s.plan(framing="close", chunks=5, interval_ms=10)
    answer = await s.fetch(s.post(s.body(marker)))
    expect(answer.status == 200 and answer.complete, f"the stream ended as {answer}")
    expect(answer.events[-1:] == [b"[DONE]"], "the stream did not come to its end")


@section.case(
    "slow-reader",
    "a client that does not read stops the engine, and nobody else",
    reference="vllm-project/vllm#41250",
    expected="of 64 MB at most 32 leave the engine; another stream takes no longer than it should",
    ends_idle=True,
)
async def slow_reader(s: Setting) -> None:
    marker = await s.plan(chunks=1024, chunk_bytes=65536, interval_ms=0.1)
    client = await s.connect(receive_buffer=65536)
    client.transport.pause_reading()
    client.send(s.post(s.body(marker)))
    await s.reached(marker)
    other = await s.plan(chunks=20, interval_ms=20)
    started = time.monotonic()
    answer = await s.fetch(s.post(s.body(other)))
    took = time.monotonic() - started
    expect(answer.status == 200 and answer.complete, f"the other stream ended as {answer}")
    expect(took < 1.5, f"the other stream took {took:.1f} s instead of 0.4 s")
    sent = -1
    while (seen := (await s.engine.log(marker))[0]["sent_bytes"]) != sent:
        sent = seen
        await asyncio.sleep(0.3)
    # The system's own buffers on the way may take 20 MB where it lets them grow (net.ipv4.tcp_rmem).
    expect(sent < 32 * MIB, f"{sent / MIB:.0f} MB left the engine for a client that reads nothing")
