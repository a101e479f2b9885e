"""Request and response heads: what is passed on, what is dropped, what is added."""

from __future__ import annotations

import functools
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
# What `Connection` may name of itself.
_OF_CONNECTION = frozenset({b"keep-alive", b"close"})
_BODILESS = (b"GET", b"HEAD", b"OPTIONS")
# Made anew for the engine: the body is whole and its length known when it is sent.
_REMADE = HOP_BY_HOP | {
    *(b"host", b"content-length", b"expect", b"via", b"x-forwarded-for", b"http2-settings"),
}
# Trailer field names are kept: trailers are relayed with the body.
_NOT_RELAYED = (HOP_BY_HOP - {b"trailer"}) | {b"x-accel-buffering"}


_WAYS = (b"via", b"x-forwarded-for")


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    """Header names that `Connection` declares to be of this connection only."""
    names: set[bytes] = set()
    for name, value in headers:
        if name.lower() == b"connection":
            names.update([part.strip().lower() for part in value.split(b",")])
    return frozenset(names - _OF_CONNECTION)


def _relayed(headers: Headers, dropped: frozenset[bytes]) -> tuple[list[bytes], dict[bytes, bytes]]:
    """The lines that are passed on, in parts; of what is dropped, the hops that it came over."""
    parts: list[bytes] = []  # joined later, which takes half the time of formatting each line
    hops: dict[bytes, bytes] = {}
    for name, value in headers:
        lower = name.lower()
        if lower not in dropped:
            parts += (name, b": ", value, b"\r\n")
        elif lower == b"connection":
            named = _named_by_connection(headers)
            if not named <= dropped:
                return _relayed(headers, dropped | named)
        elif lower in _WAYS:
            hops[lower] = hops.get(lower, b"") + value + b", "
    return parts, hops


@functools.lru_cache(maxsize=64)
def _dropped_towards_engine(also: frozenset[bytes]) -> frozenset[bytes]:
    return _REMADE | also


def request_head(
    method: bytes,
    target: bytes,
    host: bytes,
    headers: Headers,
    *,
    body_bytes: int,
    peer: bytes,
    drop: frozenset[bytes] = frozenset(),
) -> bytes:
    """The head sent to the engine. `body_bytes` is the length of the body that follows.

    `Via` and `X-Forwarded-For` are added to, over all their lines: what a client claims there stays
    readable, and our own entry is always the last one.
    """
    parts, hops = _relayed(headers, _dropped_towards_engine(drop))
    length = b"" if not body_bytes and method in _BODILESS else b"content-length: %d\r\n" % body_bytes
    return b"%b %b HTTP/1.1\r\nhost: %b\r\n%b%bvia: %b1.1 kvgate\r\nx-forwarded-for: %b%b\r\n\r\n" % (
        method,
        target,
        host,
        b"".join(parts),
        length,
        hops.get(b"via", b""),
        hops.get(b"x-forwarded-for", b""),
        peer,
    )


def response_head(status: int, phrase: bytes, headers: Headers, framing: bytes, added: bytes) -> bytes:
    """The head sent to the client. `framing` and `added` are whole header lines."""
    lines = b"".join(_relayed(headers, _NOT_RELAYED)[0])
    # nginx and its relatives buffer a stream unless told not to.
    unbuffered = b"x-accel-buffering: no\r\n" if b"text/event-stream" in lines.lower() else b""
    return b"HTTP/1.1 %d %b\r\n%b%b%b%b\r\n" % (status, phrase, lines, unbuffered, framing, added)


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
