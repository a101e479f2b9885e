"""Request and response heads: what is passed on, what is dropped, what is added."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

Headers: TypeAlias = list[tuple[bytes, bytes]]

# RFC 9110 section 7.6.1 (and the two that only HTTP/1.0 peers use): of one connection only.
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# Made anew for the engine: the body is whole and its length known when it is sent.
_REMADE = HOP_BY_HOP | {
    *(b"host", b"content-length", b"expect", b"via", b"x-forwarded-for", b"http2-settings"),
}
# Trailer field names are kept: trailers are relayed with the body.
_NOT_RELAYED = (HOP_BY_HOP - {b"trailer"}) | {b"x-accel-buffering"}


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    """Header names that `Connection` declares to be of this connection only."""
    names: set[bytes] = set()
    for name, value in headers:
        if name.lower() == b"connection":
            names.update(part.strip().lower() for part in value.split(b","))
    return frozenset(names)


def request_head(
    method: bytes,
    target: bytes,
    host: bytes,
    headers: Headers,
    *,
    body_bytes: int,
    peer: bytes,
    drop: Iterable[bytes] = (),
) -> bytes:
    """The head sent to the engine. `body_bytes` is the length of the body that follows.

    `Via` and `X-Forwarded-For` are added to, over all their lines: what a client claims there stays
    readable, and our own entry is always the last one.
    """
    dropped = _REMADE | _named_by_connection(headers) | frozenset(drop)
    forwarded: list[bytes] = []
    via: list[bytes] = []
    lines = [b"%s %s HTTP/1.1\r\nhost: %s\r\n" % (method, target, host)]
    for name, value in headers:
        lower = name.lower()
        if lower not in dropped:
            lines.append(b"%s: %s\r\n" % (name, value))
        elif lower == b"x-forwarded-for":
            forwarded.append(value)
        elif lower == b"via":
            via.append(value)
    if body_bytes or method not in (b"GET", b"HEAD", b"OPTIONS"):
        lines.append(b"content-length: %d\r\n" % body_bytes)
    way, hops = b", ".join([*via, b"1.1 kvgate"]), b", ".join([*forwarded, peer])
    lines.append(b"via: %s\r\nx-forwarded-for: %s\r\n\r\n" % (way, hops))
    return b"".join(lines)


def response_head(status: int, phrase: bytes, headers: Headers, framing: bytes, added: bytes) -> bytes:
    """The head sent to the client. `framing` and `added` are whole header lines."""
    dropped = _NOT_RELAYED | _named_by_connection(headers)
    lines = [b"HTTP/1.1 %d %s\r\n" % (status, phrase)]
    is_events = False
    for name, value in headers:
        lower = name.lower()
        if lower in dropped:
            continue
        if lower == b"content-type" and value[:17].lower() == b"text/event-stream":
            is_events = True
        lines.append(b"%s: %s\r\n" % (name, value))
    if is_events:
        # nginx and its relatives buffer a stream unless told not to.
        lines.append(b"x-accel-buffering: no\r\n")
    lines.append(framing + added + b"\r\n")
    return b"".join(lines)


def own_response(status: int, phrase: str, header_lines: bytes, body: bytes, *, close: bool) -> bytes:
    """A whole response made by the gate itself."""
    connection = b"connection: close\r\n" if close else b""
    return b"HTTP/1.1 %d %s\r\ncontent-length: %d\r\n%s%s\r\n%s" % (
        status,
        phrase.encode("ascii"),
        len(body),
        connection,
        header_lines,
        body,
    )
