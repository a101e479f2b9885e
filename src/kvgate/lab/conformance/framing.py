"""Framing: heads too large or broken, fields of one connection, answers that lie about themselves."""

from __future__ import annotations

import asyncio
import base64

from kvgate.lab.conformance.case import NotApplicable, Section, expect
from kvgate.lab.conformance.raw_client import Client
from kvgate.lab.conformance.setting import CHAT, MODELS, Setting

section = Section("Framing", 5)


async def _is_refused(s: Setting, data: bytes, marker: str, what: str) -> None:
    client = await s.send(data)
    await client.until(lambda: client.answers or client.garbled, 3.0)
    status = client.answers[0].status if client.answers else None
    expect(not await s.engine.log(marker, None), f"{what} reached the engine (the client got {status})")
    expect(status is None or 400 <= status < 500 or status in (501, 505), f"{what} got {status}")
    expect(status is not None or client.closed, f"{what} got no answer within 3 s")


@section.case(
    "head-too-large",
    "a head of 4 MB is refused",
    reference="RFC 6585 section 5",
    expected="a 4xx or a closed connection; nothing reaches the engine",
)
async def head_too_large(s: Setting) -> None:
    marker = await s.plan()
    lines = "X-Large: " + "a" * 4 * 1024 * 1024 + "\r\n"
    await _is_refused(s, s.post(s.body(marker), lines=lines), marker, "a head of 4 MB")


@section.case(
    "too-many-headers",
    "a head of 50,000 fields is refused",
    reference="RFC 6585 section 5",
    expected="a 4xx or a closed connection; nothing reaches the engine",
)
async def too_many_headers(s: Setting) -> None:
    marker = await s.plan()
    lines = "".join(f"X-{i}: a\r\n" for i in range(50_000))
    await _is_refused(s, s.post(s.body(marker), lines=lines), marker, "a head of 50,000 fields")


@section.case(
    "not-http",
    "bytes that are not HTTP/1.1 are refused",
    reference="RFC 9112 section 2.2",
    expected="a 4xx, 505 or a closed connection for each of five kinds",
)
async def not_http(s: Setting) -> None:
    marker = await s.plan()
    for data in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500,
        f"GET {MODELS}?{marker} HTTP/9.9\r\nHost: a\r\n\r\n".encode(),
        f"GET {MODELS}?{marker} extra HTTP/1.1\r\nHost: a\r\n\r\n".encode(),
        f"GET {MODELS}?{marker} HTTP/1.1\r\nNo colon here\r\n\r\n".encode(),
        f"{{GET}} {MODELS}?{marker} HTTP/1.1\r\nHost: a\r\n\r\n".encode(),
    ):
        await _is_refused(s, data, marker, repr(data[:40]))


@section.case(
    "control-characters",
    "NUL in a header value is refused or replaced",
    reference="RFC 9110 section 5.5",
    expected="a 4xx, or a value without it at the engine",
)
async def control_characters(s: Setting) -> None:
    marker = await s.plan()
    garbled = (await s.engine.stats())["garbled"]
    client = await s.send(s.post(s.body(marker), lines="X-Nul: a\0b\r\n"))
    await client.until(lambda: client.answers or client.garbled, 3.0)
    for record in await s.engine.log(marker):
        values = [value for name, value in record["headers"] if name == "x-nul"]
        expect("\0" not in "".join(values), f"the engine got {values}")
    garbled = (await s.engine.stats())["garbled"] - garbled
    expect(not garbled, "bytes that the engine could not read as HTTP were passed on to it")


@section.case(
    "hop-by-hop",
    "fields of one connection only are not passed to the engine",
    reference="RFC 9110 section 7.6.1",
    expected="Keep-Alive, TE, Proxy-Connection, Upgrade and what Connection names stay behind",
)
async def hop_by_hop(s: Setting) -> None:
    marker = await s.plan()
    lines = (
        "Connection: keep-alive, X-Of-This-Hop\r\nX-Of-This-Hop: 1\r\nKeep-Alive: timeout=5\r\n"
        "TE: trailers\r\nProxy-Connection: keep-alive\r\nX-End-To-End: 1\r\n"
    )
    answer = await s.fetch(s.post(s.body(marker), lines=lines))
    expect(answer.status == 200, f"got {answer}")
    names = {name for name, _ in (await s.reached(marker))["headers"]}
    passed = names & {"x-of-this-hop", "keep-alive", "te", "proxy-connection"}
    expect(not passed, f"the engine got {', '.join(sorted(passed))}")


@section.case(
    "hop-by-hop-answer",
    "fields of one connection only are not passed to the client",
    reference="RFC 9110 section 7.6.1",
    expected="Keep-Alive and what the engine's Connection names stay behind",
)
async def hop_by_hop_answer(s: Setting) -> None:
    extra = [["connection", "keep-alive, x-of-that-hop"], ["x-of-that-hop", "1"], ["keep-alive", "timeout=5"]]
    marker = await s.plan(headers=extra)
    answer = await s.fetch(s.post(s.body(marker)))
    expect(answer.status == 200, f"got {answer}")
    expect(answer.header("x-of-that-hop") is None, "x-of-that-hop was passed on")
    expect((answer.header("keep-alive") or "") != "timeout=5", "the engine's Keep-Alive was passed on")


@section.case(
    "forwarded-for",
    "the engine learns for whom it works, and a claim of the client stays a claim",
    reference="RFC 7239 section 8.1",
    expected="X-Forwarded-For ends with the client's address; what the client claimed stands before it",
)
async def forwarded_for(s: Setting) -> None:
    marker = await s.plan()
    answer = await s.fetch(s.post(s.body(marker), lines="X-Forwarded-For: 203.0.113.9\r\n"))
    expect(answer.status == 200, f"got {answer}")
    values = [v for name, v in (await s.reached(marker))["headers"] if name == "x-forwarded-for"]
    chain = [part.strip() for part in ",".join(values).split(",")]
    expect(chain[-1] != "203.0.113.9", f"the last address is the client's claim: {chain}")
    expect(len(chain) <= 2 and chain != [""], f"x-forwarded-for is {values or 'absent'}")


async def _next_is_own(s: Setting, client: Client, poison: bytes) -> None:
    """Neither this connection nor another gets what the engine sent unasked."""
    expect(poison not in client.received, "what the engine sent unasked reached the client")
    for _ in range(3):
        marker = await s.plan()
        answer = await s.fetch(s.post(s.body(marker, stream=False)))
        expect(poison not in answer.body, "another client got what the engine sent unasked")
        expect(answer.status == 200, f"the next request got {answer}")


@section.case(
    "unasked-answer",
    "a second answer that nobody asked for is given to nobody",
    reference="RFC 9112 section 9.2",
    expected="the first answer, a 5xx or a cut; the next requests get their own answers",
)
async def unasked_answer(s: Setting) -> None:
    body = b'{"id": "asked", "choices": []}'
    real = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
    extra = b'{"id": "POISON", "choices": []}'
    for pieces in ([real % (len(body), body) + real % (len(extra), extra)],
                   [real % (len(body), body), real % (len(extra), extra)]):  # fmt: skip
        marker = await s.plan(wire=[base64.b64encode(p).decode() for p in pieces], interval_ms=20)
        client = await s.send(s.post(s.body(marker, stream=False)))
        await client.head()
        await asyncio.sleep(0.05)
        await _next_is_own(s, client, b"POISON")


@section.case(
    "bad-answer-framing",
    "an answer with broken framing is not shown as a whole one",
    reference="RFC 9112 section 6.3",
    expected="a 5xx or a visibly broken answer for two lengths, a bad chunk size and a bad status line",
)
async def bad_answer_framing(s: Setting) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
    for data in (
        head + b"content-length: 2\r\ncontent-length: 9\r\n\r\n{}\r\n{} {}",
        head + b"transfer-encoding: chunked\r\n\r\nxyz\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n{}",
    ):
        marker = await s.plan(wire=[base64.b64encode(data).decode()], connection_close=True)
        client = await s.send(s.post(s.body(marker, stream=False)))
        try:
            answer = await client.answer()
        except ConnectionError:
            continue  # cut: the client knows
        expect(answer.status >= 500 or not answer.complete, f"{data[-30:]!r} came as {answer}")


@section.case(
    "slow-heads",
    "200 connections that send their heads byte by byte keep nobody out",
    reference="CWE-400",
    expected="another request gets 200 within 2 s",
    seconds=15,
)
async def slow_heads(s: Setting) -> None:
    start = s.head("POST", CHAT, "")[:-2]
    clients = await asyncio.gather(*(s.connect() for _ in range(200)))
    for at in range(3):
        for client in clients:
            client.send(start[at : at + 1])
    marker = await s.plan()
    answer = await s.fetch(s.post(s.body(marker)), 2.0)
    expect(answer.status == 200, f"got {answer}")


@section.case(
    "upgrade-declined",
    "an offer to upgrade does not open a tunnel to the engine",
    reference="RFC 9110 section 7.8",
    expected="no 101, and the offer is not passed on to the engine",
)
async def upgrade_declined(s: Setting) -> None:
    outer = await s.plan()
    lines = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    client = await s.send(s.head("GET", f"{MODELS}?{outer}", lines))
    if not await client.until(lambda: client.received, 5.0):
        raise NotApplicable("the gateway closed the connection at the offer")
    expect(b" 101 " not in client.received[:16], "the gateway switched protocols")
    seen = await s.engine.log(outer, None)
    offered = [v for r in seen for name, v in r["headers"] if name == "upgrade"]
    expect(not offered, f"the engine was offered {offered}")
