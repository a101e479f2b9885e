"""Requests that two readers could take for two different things: refused, or passed on with one meaning.

Each row is one such request. What counts is what the engine gets: nothing, or exactly one request whose
length everybody agrees on; and that the connection is not used for what follows a refusal.
"""

from __future__ import annotations

import asyncio
import re

import pytest
from inside import ANSWER, COMPLETION, exchange, gateway_and_engine

POST = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
SIZED = b"Content-Length: %d\r\n" % len(COMPLETION)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
# A second request hidden behind the first: it must never reach the engine.
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: t\r\n\r\n"


def chunk(body: bytes = COMPLETION) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


def chunks(first: bytes) -> bytes:
    """A chunked request with an odd first chunk, and a second request behind it."""
    return POST + CHUNKED + b"\r\n" + first + b"0\r\n\r\n" + SMUGGLED


def field(line: bytes, body: bytes = COMPLETION) -> bytes:
    return POST + line + b"\r\n" + body + SMUGGLED


REFUSED: dict[str, tuple[bytes, int]] = {
    "both lengths": (field(SIZED + CHUNKED, chunk() + b"0\r\n\r\n"), 400),
    "both lengths, the other way round": (field(CHUNKED + SIZED, b"0\r\n\r\n"), 400),
    "two different lengths": (field(SIZED + b"Content-Length: 3\r\n"), 400),
    "two equal lengths": (field(SIZED + SIZED), 400),
    "a list of lengths": (field(b"Content-Length: 38, 38\r\n"), 400),
    "a length with a plus": (field(b"Content-Length: +38\r\n"), 400),
    "a negative length": (field(b"Content-Length: -1\r\n"), 400),
    "a hexadecimal length": (field(b"Content-Length: 0x26\r\n"), 400),
    "an empty length": (field(b"Content-Length:\r\n"), 400),
    "a length with a space in it": (field(b"Content-Length: 3 8\r\n"), 400),
    "a length beyond 64 bits": (field(b"Content-Length: 99999999999999999999999\r\n"), 400),
    "a length beyond the limit": (field(b"Content-Length: 99999999999\r\n"), 413),
    "a folded field": (field(SIZED + b"X: a\r\n b\r\n"), 400),
    "a folded length": (field(b"Content-Length:\r\n 38\r\n"), 400),
    "a folded coding": (field(b"Transfer-Encoding:\r\n chunked\r\n", b"0\r\n\r\n"), 400),
    "a space before the first field": (b"GET / HTTP/1.1\r\n Host: t\r\n\r\n" + SMUGGLED, 400),
    "bare line feeds": (b"POST /v1/completions HTTP/1.1\nHost: t\n" + SIZED[:-2] + b"\n\n" + COMPLETION, 400),
    "one bare line feed": (field(b"X: a\nY: b\r\n" + SIZED), 400),
    "a bare line feed at the end of the head": (POST + SIZED + b"\n" + COMPLETION, 400),
    "a bare carriage return in a value": (field(b"X: a\rY: b\r\n" + SIZED), 400),
    "a carriage return too many": (field(b"X: a\r\r\n" + SIZED), 400),
    "a carriage return in a name": (field(b"X\r: a\r\n" + SIZED), 400),
    "NUL in a value": (field(b"X: a\0b\r\n" + SIZED), 400),
    "NUL in a name": (field(b"X\0: a\r\n" + SIZED), 400),
    "a control character in a value": (field(b"X: a\x01\r\n" + SIZED), 400),
    "a space before the colon": (field(b"Content-Length : 38\r\n"), 400),
    "a field without a colon": (field(b"Xyz\r\n" + SIZED), 400),
    "a field without a name": (field(b": a\r\n" + SIZED), 400),
    "identity": (field(b"Transfer-Encoding: identity\r\n"), 501),
    "another coding": (field(b"Transfer-Encoding: xchunked\r\n"), 501),
    "chunked, then identity": (field(b"Transfer-Encoding: chunked, identity\r\n", b"0\r\n\r\n"), 400),
    "identity, then chunked": (field(b"Transfer-Encoding: identity, chunked\r\n", b"0\r\n\r\n"), 501),
    "gzip, then chunked": (field(b"Transfer-Encoding: gzip, chunked\r\n", b"0\r\n\r\n"), 501),
    "chunked twice": (field(CHUNKED + CHUNKED, b"0\r\n\r\n"), 400),
    "chunked and identity on two lines": (
        field(CHUNKED + b"Transfer-Encoding: identity\r\n", b"0\r\n\r\n"),
        400,
    ),
    "chunked in quotes": (field(b'Transfer-Encoding: "chunked"\r\n', b"0\r\n\r\n"), 501),
    "chunked behind a vertical tab": (field(b"Transfer-Encoding: \x0bchunked\r\n", b"0\r\n\r\n"), 400),
    "an empty coding": (field(b"Transfer-Encoding:\r\n", b"0\r\n\r\n"), 400),
    "chunked in HTTP/1.0": (
        b"POST /v1/completions HTTP/1.0\r\n" + CHUNKED + b"\r\n0\r\n\r\n" + SMUGGLED,
        400,
    ),
    "a negative chunk": (chunks(b"-26\r\n" + COMPLETION + b"\r\n"), 400),
    "a chunk size with 0x": (chunks(b"0x26\r\n" + COMPLETION + b"\r\n"), 400),
    "a chunk size beyond 64 bits": (chunks(b"10000000000000026\r\n" + COMPLETION + b"\r\n"), 400),
    "a chunk size beyond the limit": (chunks(b"fffffff0\r\n" + 33 * 2**20 * b"x"), 413),
    "a space before a chunk size": (chunks(b" 26\r\n" + COMPLETION + b"\r\n"), 400),
    "a space after a chunk size": (chunks(b"26 \r\n" + COMPLETION + b"\r\n"), 400),
    "an underscore in a chunk size": (chunks(b"2_6\r\n" + COMPLETION + b"\r\n"), 400),
    "no chunk size": (chunks(b"\r\n" + COMPLETION + b"\r\n"), 400),
    "a chunk that ends in a line feed": (chunks(b"26\r\n" + COMPLETION + b"\n"), 400),
    "a chunk size that ends in a line feed": (chunks(b"26\n" + COMPLETION + b"\r\n"), 400),
    "a chunk that is longer than its size": (chunks(b"20\r\n" + COMPLETION + b"\r\n"), 400),
    "a line feed in a chunk extension": (chunks(b"26;a\nb\r\n" + COMPLETION + b"\r\n"), 400),
    "an endless chunk extension": (chunks(b"26;" + b"a" * 500_000), 431),
    "a length among the trailers": (
        POST + CHUNKED + b"\r\n" + chunk() + b"0\r\nContent-Length: 5\r\n\r\n" + SMUGGLED,
        400,
    ),
    "endless trailers": (POST + CHUNKED + b"\r\n" + chunk() + b"0\r\n" + b"A: b\r\n" * 100_000, 431),
    "one endless trailer": (POST + CHUNKED + b"\r\n" + chunk() + b"0\r\nA: " + b"b" * 500_000, 431),
    "too large a head": (field(b"X: " + b"a" * 70_000 + b"\r\n" + SIZED), 431),
    "one endless field": (POST + b"X: " + b"a" * 500_000, 431),
    "an endless target": (b"GET /" + b"a" * 500_000, 431),
    "too many fields": (field(b"A: b\r\n" * 300 + SIZED), 431),
    "no host": (b"GET /x HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET /x HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n" + SMUGGLED, 400),
    "a target of another scheme": (b"GET ftp://t/x HTTP/1.1\r\nHost: t\r\n\r\n" + SMUGGLED, 400),
    "a target that is an address": (b"CONNECT t:80 HTTP/1.1\r\nHost: t\r\n\r\n" + SMUGGLED, 405),
    "an address for GET": (b"GET t:80 HTTP/1.1\r\nHost: t\r\n\r\n" + SMUGGLED, 400),
    "a star for GET": (b"GET * HTTP/1.1\r\nHost: t\r\n\r\n" + SMUGGLED, 400),
    "a target with a control character": (b"GET /a\x01 HTTP/1.1\r\nHost: t\r\n\r\n" + SMUGGLED, 400),
    "a target with a raw byte": (b"GET /\xe9 HTTP/1.1\r\nHost: t\r\n\r\n" + SMUGGLED, 400),
    "HTTP/0.9": (b"GET /x\r\n\r\n", 505),
    "HTTP/0.9 by name": (b"GET /x HTTP/0.9\r\nHost: t\r\n\r\n" + SMUGGLED, 505),
    "HTTP/2.0 by name": (b"GET /x HTTP/2.0\r\nHost: t\r\n\r\n" + SMUGGLED, 505),
    "HTTP/1.2": (b"GET /x HTTP/1.2\r\nHost: t\r\n\r\n" + SMUGGLED, 400),
    "the preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00", 400),
    "a TLS handshake": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "a method in small letters": (b"get /x HTTP/1.1\r\nHost: t\r\n\r\n" + SMUGGLED, 400),
    "words behind the version": (b"GET /x HTTP/1.1 x\r\nHost: t\r\n\r\n" + SMUGGLED, 400),
}

# What is passed on: bytes sent, and the body that the engine gets (once).
ONE_MEANING: dict[str, tuple[bytes, bytes, bytes]] = {
    "a length with spaces around it": (
        POST + b"Content-Length:  38\t\r\n\r\n" + COMPLETION,
        b"POST /v1/completions HTTP/1.1\r\n",
        COMPLETION,
    ),
    "chunk extensions": (
        POST + CHUNKED + b"\r\n26;a=b\r\n" + COMPLETION + b"\r\n0;c\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\n",
        COMPLETION,
    ),
    "trailers, which are dropped": (
        POST + CHUNKED + b"\r\n" + chunk() + b"0\r\nAuthorization: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\n",
        COMPLETION,
    ),
    "trailers behind no body": (
        b"GET /x HTTP/1.1\r\nHost: t\r\n" + CHUNKED + b"\r\n0\r\nAuthorization: x\r\n\r\n",
        b"GET /x HTTP/1.1\r\n",
        b"",
    ),
    "a proxy's form of the target": (
        b"GET http://elsewhere/x?y HTTP/1.1\r\nHost: t\r\n\r\n",
        b"GET /x?y HTTP/1.1\r\n",
        b"",
    ),
    "a proxy's form without a path": (
        b"GET http://elsewhere?y HTTP/1.1\r\nHost: t\r\n\r\n",
        b"GET /?y ",
        b"",
    ),
    "an offer of HTTP/2 with a body": (
        POST
        + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"
        + SIZED
        + b"\r\n"
        + COMPLETION,
        b"POST /v1/completions HTTP/1.1\r\n",
        COMPLETION,
    ),
    "an offer of HTTP/2 with a chunked body": (
        POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\n" + CHUNKED + b"\r\n" + chunk() + b"0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\n",
        COMPLETION,
    ),
    "an offer of web sockets": (
        b"GET /x HTTP/1.1\r\nHost: t\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"GET /x HTTP/1.1\r\n",
        b"",
    ),
    "HTTP/1.0 with a length": (
        b"POST /v1/completions HTTP/1.0\r\n" + SIZED + b"\r\n" + COMPLETION,
        b"POST /v1/completions HTTP/1.1\r\n",
        COMPLETION,
    ),
    "empty lines before the request": (b"\r\n\r\nGET /x HTTP/1.1\r\nHost: t\r\n\r\n", b"GET /x ", b""),
}


@pytest.mark.parametrize("pieces", [1, 3], ids=["at once", "in pieces"])
@pytest.mark.parametrize("name", REFUSED)
async def test_what_can_be_read_in_two_ways_is_refused_and_nothing_reaches_the_engine(
    name: str, pieces: int
) -> None:
    data, status = REFUSED[name]
    async with gateway_and_engine() as (gateway, engine):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        try:
            size = -(-len(data) // pieces)
            for at in range(0, len(data), size):
                writer.write(data[at : at + size])
                await asyncio.sleep(0.002)
            async with asyncio.timeout(10):
                answer = await reader.read()
        finally:
            writer.close()
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
        assert answer.count(b"HTTP/1.1 ") == 1
        assert b"\r\nconnection: close\r\n" in answer
        assert engine.seen == []
    assert engine.rest == b""


@pytest.mark.parametrize("name", ONE_MEANING)
async def test_what_has_one_meaning_reaches_the_engine_once_in_one_form(name: str) -> None:
    data, line, body = ONE_MEANING[name]
    async with gateway_and_engine() as (gateway, engine):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(data)
        async with asyncio.timeout(5):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.close()
    ((head, got),) = engine.seen
    assert head.startswith(line)
    assert (got, engine.rest) == (body, b"")
    for gone in (b"authorization", b"transfer-encoding", b"upgrade", b"http2-settings", b"\r\nconnection"):
        assert gone not in head.lower()
    assert head.lower().count(b"\r\nhost: ") == 1


async def test_a_request_behind_a_declined_offer_is_answered_too() -> None:
    offer = b"GET /x HTTP/1.1\r\nHost: t\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    async with gateway_and_engine() as (gateway, engine):
        data = offer + offer + b"GET /y HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n"
        answer = await exchange(gateway.port, data)
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert [head.split(b" ")[1] for head, _ in engine.seen] == [b"/x", b"/x", b"/y"]


async def test_requests_ahead_of_their_turn_are_bounded_and_those_taken_are_answered_in_order() -> None:
    async with gateway_and_engine() as (gateway, engine):
        many = b"".join(b"GET /%d HTTP/1.1\r\nHost: t\r\n\r\n" % n for n in range(100))
        answer = await exchange(gateway.port, many)
    statuses = re.findall(rb"HTTP/1.1 (\d+) ", answer)
    assert statuses == [b"200"] * (len(statuses) - 1) + [b"400"]
    assert 32 <= len(statuses) <= 34
    assert [head.split(b" ")[1] for head, _ in engine.seen] == [b"/%d" % n for n in range(len(statuses) - 1)]


ODD_ANSWERS = {
    "a line feed in a value": b"HTTP/1.1 200 OK\r\nX: a\nSet-Cookie: b\r\ncontent-length: 0\r\n\r\n",
    "a carriage return in a value": b"HTTP/1.1 200 OK\r\nX: a\rSet-Cookie: b\r\ncontent-length: 0\r\n\r\n",
    "NUL in a value": b"HTTP/1.1 200 OK\r\nX: a\0\r\ncontent-length: 0\r\n\r\n",
    "a folded value": b"HTTP/1.1 200 OK\r\nX: a\r\n b: c\r\ncontent-length: 0\r\n\r\n",
    "a carriage return in the phrase": b"HTTP/1.1 200 O\rK\r\ncontent-length: 0\r\n\r\n",
    "a line feed in the phrase": b"HTTP/1.1 200 O\nSet-Cookie: b\r\ncontent-length: 0\r\n\r\n",
    "both lengths": ANSWER.replace(b"\r\n\r\n", b"\r\ntransfer-encoding: chunked\r\n\r\n"),
    "two lengths": ANSWER.replace(b"\r\n\r\n", b"\r\ncontent-length: 3\r\n\r\n"),
    "another coding": b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a coding that only looks like chunked": b"HTTP/1.1 200 OK\r\ntransfer-encoding: xchunked\r\n\r\nx",
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    "a second answer": ANSWER + ANSWER,
}


@pytest.mark.parametrize("name", ODD_ANSWERS)
async def test_an_answer_that_could_be_read_in_two_ways_never_reaches_a_client(name: str) -> None:
    async with gateway_and_engine(ODD_ANSWERS[name]) as (gateway, _):
        asked = b"GET /x HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n"
        answer = await exchange(gateway.port, asked)
    if name == "a second answer":
        # The first may have been passed on before the second came; nothing of the second may.
        assert answer.count(b"HTTP/1.1 ") <= 1
    else:
        assert answer.startswith(b"HTTP/1.1 503 "), answer[:200]
    assert b"et-Cookie" not in answer
    assert answer.count(b"\r\n\r\n") <= 1


@pytest.mark.parametrize(
    "data",
    [
        b"POST /%0d%0aSet-Cookie:%20a=b HTTP/1.1\r\nHost: t\r\nContent-Length: 0\r\n\r\n",
        POST + b'Content-Length: 26\r\n\r\n{"prompt":"\\r\\nSet-Cookie"}',
        POST + b'Content-Length: 27\r\n\r\n{"\r\nSet-Cookie: a": [1, 2]}',
    ],
    ids=["target", "JSON value", "JSON key"],
)
async def test_our_own_answers_repeat_nothing_of_a_client_in_their_head(data: bytes) -> None:
    async with gateway_and_engine(b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n") as (gateway, _):
        answer = await exchange(gateway.port, data.replace(b"Host: t", b"Host: t\r\nConnection: close"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 ")
    assert b"cookie" not in head.lower()
    assert b"\r\n" not in body


@pytest.mark.parametrize("path", [b"/status", b"/metrics", b"/healthz", b"/explain", b"/reload", b"//status"])
async def test_the_admin_pages_are_not_on_the_port_of_the_clients(path: bytes) -> None:
    async with gateway_and_engine() as (gateway, engine):
        get = b"GET %s HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n" % path
        post = b"POST %s HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}" % path
        assert (await exchange(gateway.port, get)).endswith(b"\r\n\r\n{}")
        assert b"unpriced_endpoint" in await exchange(gateway.port, post)
    assert [head.split(b" ")[1] for head, _ in engine.seen] == [path]
