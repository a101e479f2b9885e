"""Request smuggling: no byte sequence makes gateway and engine disagree about a request's end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvgate.lab.conformance.case import Section, expect
from kvgate.lab.conformance.setting import CHAT, MODELS, Setting

section = Section("Smuggling", 4)
SMUGGLING = "RFC 9112 section 11.2"
# Some readers let LF end a line. With this they may, but what follows is nobody's request.
CLOSE = "Connection: close\r\n"
Variant = Callable[[Setting, bytes, bytes], bytes]


def hidden(s: Setting, marker: str) -> bytes:
    """The request that must not be: it would reach the engine as one of its own."""
    return s.head("GET", f"{MODELS}?{marker}", "")


def posted(lines: str) -> Variant:
    """The head of a POST. `{length}`: of the body; `{both}`: of body and hidden request; `{all}`: of
    the body in chunks and the hidden request, so that read by length there is one request only."""

    def variant(s: Setting, body: bytes, inner: bytes) -> bytes:
        whole = len(_chunks(body)) + len(inner)
        shown = lines.replace("{length}", str(len(body))).replace("{both}", str(len(body + inner)))
        shown = shown.replace("{all}", str(whole))
        return s.head("POST", CHAT, "Content-Type: application/json\r\n" + shown)

    return variant


def _chunks(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


def after_length(lines: str) -> Variant:
    """Framed by length, the hidden request behind the body."""
    head = posted(lines)
    return lambda s, body, inner: head(s, body, inner) + body + inner


def after_chunks(lines: str) -> Variant:
    """Framed by chunks, the hidden request behind the last one."""
    head = posted(lines)
    return lambda s, body, inner: head(s, body, inner) + _chunks(body) + inner


def chunks_with(size_line: bytes, lines: str = "") -> Variant:
    """One chunk with an odd size line."""
    head = posted("Transfer-Encoding: chunked\r\n" + lines)

    def variant(s: Setting, body: bytes, inner: bytes) -> bytes:
        line = size_line.replace(b"SIZE", b"%x" % len(body))
        return head(s, body, inner) + line + body + b"\r\n0\r\n\r\n" + inner

    return variant


# What must not be taken for two requests. Where the gateway refuses, the rest is not looked at; where
# it accepts, the hidden request must have been swallowed or never sent on.
VARIANTS: dict[str, tuple[str, Variant]] = {
    "length-and-chunked": (
        "Content-Length and Transfer-Encoding together",
        after_chunks("Content-Length: {all}\r\nTransfer-Encoding: chunked\r\n"),
    ),
    "chunked-and-length": (
        "Transfer-Encoding and Content-Length together",
        after_chunks("Transfer-Encoding: chunked\r\nContent-Length: {all}\r\n"),
    ),
    "two-lengths": (
        "two different Content-Lengths",
        after_length("Content-Length: {length}\r\nContent-Length: {both}\r\n"),
    ),
    "length-list": ("Content-Length as a list", after_length("Content-Length: {length}, {both}\r\n")),
    "length-plus": ("Content-Length with a plus sign", after_length("Content-Length: +{length}\r\n")),
    "length-negative": ("a negative Content-Length", after_length("Content-Length: -1\r\n")),
    "length-hex": ("a hexadecimal Content-Length", after_length("Content-Length: 0x20\r\n")),
    "coding-unknown": (
        "an unknown transfer coding",
        after_chunks("Transfer-Encoding: xchunked\r\nContent-Length: {all}\r\n"),
    ),
    "coding-not-last": (
        "chunked not the last coding",
        after_chunks("Transfer-Encoding: chunked, identity\r\n"),
    ),
    "coding-twice": (
        "two Transfer-Encoding fields that differ",
        after_chunks("Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n"),
    ),
    "coding-vertical-tab": (
        "a vertical tab before the coding",
        after_chunks("Transfer-Encoding: \x0bchunked\r\nContent-Length: {all}\r\n"),
    ),
    "space-before-colon": (
        "a space before the colon",
        after_chunks("Transfer-Encoding : chunked\r\nContent-Length: {all}\r\n"),
    ),
    "obs-fold": (
        "a folded header line",
        after_chunks("X-Folded: a\r\n Transfer-Encoding: chunked\r\nContent-Length: {all}\r\n"),
    ),
    "bare-lf": (
        "a header line that ends with LF alone",
        after_chunks("X-Bare: a\nTransfer-Encoding: chunked\r\nContent-Length: {all}\r\n"),
    ),
    "bare-cr": (
        "a CR alone in a header value",
        after_chunks("X-Bare: a\rTransfer-Encoding: chunked\r\nContent-Length: {all}\r\n"),
    ),
    "chunk-size-hex": ("a chunk size with 0x", chunks_with(b"0xSIZE\r\n")),
    "chunk-size-overflow": ("a chunk size beyond 64 bits", chunks_with(b"1000000000000SIZE0000\r\n")),
    "chunk-size-negative": ("a negative chunk size", chunks_with(b"-SIZE\r\n")),
    "chunk-size-bare-lf": ("a chunk size line that ends with LF alone", chunks_with(b"SIZE\n", CLOSE)),
    "chunk-ext-bare-lf": ("a chunk extension with LF alone in it", chunks_with(b"SIZE;a\n\r\n", CLOSE)),
}


def _smuggling(variant: Variant) -> Callable[[Setting], Awaitable[None]]:
    async def run(s: Setting) -> None:
        marker, second = await s.plan(), await s.plan()
        whole = variant(s, s.body(marker, stream=False), hidden(s, second))
        garbled = (await s.engine.stats())["garbled"]
        client = await s.send(whole)
        await client.until(lambda: client.answers or client.garbled, 1.0)
        first = client.answers[0].status if client.answers else None
        await asyncio.sleep(0.05)
        smuggled = await s.engine.log(second, None)
        seen = await s.engine.log(marker)
        if smuggled and first is not None and first >= 400:
            expect(False, f"refused with {first}, but the bytes behind it were taken for a request")
        expect(
            not smuggled,
            f"the hidden request reached the engine (the first one got {first or 'no answer'})",
        )
        for record in seen:
            check_framing(record)
        garbled = (await s.engine.stats())["garbled"] - garbled
        expect(not garbled, "bytes that the engine could not read as HTTP were passed on to it")

    return run


def check_framing(record: dict[str, object]) -> None:
    """One framing in the head that the engine got, and a body as long as it says."""
    headers = record["headers"]
    assert isinstance(headers, list)
    lengths = [value for name, value in headers if name == "content-length"]
    codings = [value for name, value in headers if name == "transfer-encoding"]
    expect(len(lengths) + len(codings) == 1, f"the engine got lengths {lengths} and codings {codings}")
    if lengths:
        expect(
            int(lengths[0]) == record["body_bytes"], f"{lengths[0]} bytes told, {record['body_bytes']} sent"
        )


for _name, (_title, _variant) in VARIANTS.items():
    section.case(
        f"smuggle-{_name}",
        f"no second request by {_title}",
        reference=SMUGGLING,
        expected="the engine sees no request but the outer one, and that one framed one way; 400 is best",
    )(_smuggling(_variant))


@section.case(
    "get-with-body",
    "the body of a GET is not taken for a request",
    reference=SMUGGLING,
    expected="the bytes counted by Content-Length never reach the engine as a request of their own",
)
async def get_with_body(s: Setting) -> None:
    outer, inner = await s.plan(), await s.plan()
    body = hidden(s, inner)
    await (
        await s.send(s.head("GET", f"{MODELS}?{outer}", f"Content-Length: {len(body)}\r\n") + body)
    ).answer()
    await asyncio.sleep(0.05)
    expect(not await s.engine.log(inner, None), "the body of a GET reached the engine as a request")
