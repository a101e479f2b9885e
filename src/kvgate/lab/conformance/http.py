"""HTTP as clients and engines use it: continuations, interim answers, HEAD, pipelines, large bodies."""

from __future__ import annotations

import asyncio
import base64

from kvgate.lab.conformance.case import NotApplicable, Section, expect
from kvgate.lab.conformance.setting import CHAT, MODELS, Setting

section = Section("HTTP", 3, ends_idle=True)


def wire(*pieces: bytes) -> list[str]:
    return [base64.b64encode(piece).decode() for piece in pieces]


@section.case(
    "reuse-after-error",
    "a connection that carried an error carries the next request",
    expected="an engine's 500, a 400 and a 200 on one connection, or the gateway says that it closes",
    reference="RFC 9112 section 9.3",
)
async def reuse_after_error(s: Setting) -> None:
    client = await s.connect()
    for fault, status in (("500", 500), ("400", 400), (None, 200)):
        marker = await s.plan(fault=fault)
        client.send(s.post(s.body(marker, stream=False)))
        answer = await client.answer()
        expect(answer.status == status, f"instead of {status}: {answer}")
        if (answer.header("connection") or "").lower() == "close":
            client = await s.connect()


@section.case(
    "head-method",
    "HEAD has no body, and the connection is good afterwards",
    expected="nothing after the head; the next answer on the connection is well formed",
    reference="RFC 9110 section 9.3.2",
)
async def head_method(s: Setting) -> None:
    client = await s.send(s.head("HEAD", MODELS, ""))
    expect(await client.until(lambda: b"\r\n\r\n" in client.received, 5.0), "no answer to HEAD within 5 s")
    await asyncio.sleep(0.1)
    head, _, rest = client.received.partition(b"\r\n\r\n")
    expect(rest == b"", f"{len(rest)} bytes after the head: {rest[:60]!r}")
    if client.closed or b"connection: close" in head.lower():
        return
    client.send(s.head("GET", MODELS, ""))
    came = await client.until(lambda: len(client.received) > len(head) + 4, 5.0)
    expect(came, "the next request on the connection was not answered")
    following = client.received[len(head) + 4 :]
    expect(following.startswith(b"HTTP/1.1 "), f"the next answer begins with {following[:60]!r}")


@section.case(
    "status-204",
    "an answer without a body is passed on at once",
    expected="204, no body, and no wait for one",
    reference="RFC 9110 section 15.3.5",
)
async def status_204(s: Setting) -> None:
    marker = await s.plan(wire=wire(b"HTTP/1.1 204 No Content\r\nx-engine: scripted\r\n\r\n"))
    answer = await s.fetch(s.head("GET", f"{MODELS}?{marker}", ""), 3.0)
    if not await s.engine.log(marker, None):
        raise NotApplicable("the gateway answers GET /v1/models itself")
    expect(answer.status == 204 and not answer.body, f"got {answer}")


@section.case(
    "interim-103",
    "an interim answer of the engine does not take the place of the final one",
    expected="the final 200, whole; the 103 may be passed on or dropped",
    reference="RFC 9110 section 15.2",
)
async def interim(s: Setting) -> None:
    body = b'{"choices": [], "id": "scripted-1", "object": "chat.completion"}'
    early = b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"
    final = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    marker = await s.plan(wire=wire(early, final + body), interval_ms=50)
    answer = await s.fetch(s.post(s.body(marker, stream=False)))
    expect(answer.status == 200 and answer.complete, f"got {answer}")
    expect(b"scripted-1" in answer.body, f"the body came as {answer.body[:100]!r}")


@section.case(
    "expect-continue",
    "a client that waits for 100 Continue is told to go on, or answered",
    expected="100 or a final answer within 2 s of the head; then 200",
    reference="RFC 9110 section 10.1.1",
)
async def expect_continue(s: Setting) -> None:
    marker = await s.plan()
    whole = s.post(s.body(marker), lines="Expect: 100-continue\r\n")
    split = whole.index(b"\r\n\r\n") + 4
    client = await s.send(whole[:split])
    came = await client.until(lambda: client.interim or client.answers, 2.0)
    expect(came, "neither 100 Continue nor an answer within 2 s")
    client.send(whole[split:])
    answer = await client.answer()
    expect(answer.status == 200, f"got {answer}")


@section.case(
    "large-body",
    "a body of 8 MB arrives whole, or is refused with 413",
    expected="the engine gets every byte, or the client reads a 413; never a reset",
    reference="BerriAI/litellm#1477",
    seconds=20,
)
async def large_body(s: Setting) -> None:
    marker = await s.plan()
    text = "token " * (8 * 1024 * 1024 // 6)
    body = s.body(marker, messages=[{"role": "user", "content": f"{marker} {text}"}])
    client = await s.send(s.post(body))
    answer = await client.answer(15.0)
    expect(answer.status in (200, 413), f"got {answer}")
    if answer.status == 200:
        seen = await s.reached(marker)
        expect(seen["body_bytes"] >= len(text), f"the engine got {seen['body_bytes']} of {len(body)} bytes")


@section.case(
    "chunked-upload",
    "a request body in chunks reaches the engine whole",
    expected="the engine gets the same JSON, framed one way only",
    reference="RFC 9112 section 7.1",
)
async def chunked_upload(s: Setting) -> None:
    marker = await s.plan()
    body = s.body(marker)
    pieces = [body[i : i + 7] for i in range(0, len(body), 7)]
    data = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"
    lines = "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    answer = await s.fetch(s.head("POST", CHAT, lines) + data)
    expect(answer.status == 200, f"got {answer}")
    seen = await s.reached(marker)
    framings = [name for name, _ in seen["headers"] if name in ("content-length", "transfer-encoding")]
    expect(len(framings) == 1, f"the engine was told the framing as {framings}")


@section.case(
    "pipelining",
    "pipelined requests are answered in order",
    expected="two answers in order, or the first one and a clear end of the connection",
    reference="RFC 9112 section 9.3.2",
)
async def pipelining(s: Setting) -> None:
    slow, quick = (
        await s.plan(raw=_text("first"), chunks=1, first_delay_ms=200),
        await s.plan(raw=_text("second"), chunks=1),
    )
    both = s.post(s.body(slow, stream=False)) + s.post(s.body(quick, stream=False))
    client = await s.send(both)
    first = await client.answer()
    expect(b"first" in first.body, f"the first answer is {first}")
    try:
        second = await client.answer()
    except ConnectionError:
        return  # closed: the client knows that it was not answered
    expect(b"second" in second.body or second.status >= 400, f"the second answer is {second}")


def _text(word: str) -> str:
    return base64.b64encode(b'{"id": "%s", "choices": []}' % word.encode()).decode()
