"""Request and response heads: what is passed on, what is dropped, what is added."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import itemgetter
from typing import Any, TypeAlias

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
# Heads with more or longer names than these are looked at anew each time: a client cannot fill memory.
_REMEMBERED_NAMES = 64
_REMEMBERED_BYTES = 2048
_FORMS_MAX = 16
_NO_HOPS: dict[bytes, bytes] = {}


class Named:
    """What the names in the head of a request say. The same client sends the same names each time.

    `size`: their bytes together. `length`: where `Content-Length` is; -1 for nowhere. `is_plain`: there
    is no field that needs a closer look: one `Host`, no `Expect`, no `Transfer-Encoding`.
    """

    __slots__ = ("_forms", "_lower", "_names", "is_plain", "length", "size")

    def __init__(self, names: tuple[bytes, ...]) -> None:
        lower = [name.lower() for name in names]
        self._names, self._lower = names, lower
        self._forms: dict[frozenset[bytes], Form | None] = {}
        self.size = sum(map(len, names))
        self.length = _place_of(b"content-length", lower)
        is_usual = b"transfer-encoding" not in lower and b"expect" not in lower
        self.is_plain = is_usual and lower.count(b"host") == 1

    def form(self, dropped: frozenset[bytes]) -> Form | None:
        """How to write what is passed on of such a head; None where its values have a say in that."""
        if dropped not in self._forms:
            if len(self._forms) >= _FORMS_MAX:
                self._forms.clear()
            lower = self._lower
            is_simple = lower.count(b"connection") < 2 and not (dropped & set(_WAYS) & set(lower))
            self._forms[dropped] = Form(self._names, lower, dropped) if is_simple else None
        return self._forms[dropped]


class Form:
    """The lines of one kind of head, as a format for its values: one call into C writes all of them."""

    __slots__ = ("connection", "pick", "text")

    def __init__(self, names: tuple[bytes, ...], lower: list[bytes], dropped: frozenset[bytes]) -> None:
        kept = [at for at, name in enumerate(lower) if name not in dropped]
        self.text = b"".join([names[at].replace(b"%", b"%%") + b": %b\r\n" for at in kept])
        self.pick: Callable[[tuple[bytes, ...]], Any] = itemgetter(*kept) if kept else _nothing
        self.connection = _place_of(b"connection", lower)


def _nothing(values: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return ()


def _place_of(wanted: bytes, lower: list[bytes]) -> int:
    return max([at for at, name in enumerate(lower) if name == wanted], default=-1)


_remembered = functools.lru_cache(maxsize=256)(Named)


Known: TypeAlias = tuple["Named", tuple[bytes, ...]]
"""What the names of a head say, and its values, in order."""


def named(headers: Headers) -> Known:
    """The names and the values of a head, looked up once for each request."""
    if not headers:
        return _remembered(()), ()
    names, values = zip(*headers, strict=True)
    if len(names) > _REMEMBERED_NAMES or len(b"".join(names)) > _REMEMBERED_BYTES:
        return Named(names), values
    return _remembered(names), values


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    """Header names that `Connection` declares to be of this connection only."""
    names: set[bytes] = set()
    for name, value in headers:
        if name.lower() == b"connection":
            names.update([part.strip().lower() for part in value.split(b",")])
    return frozenset(names - _OF_CONNECTION)


def _relayed(
    headers: Headers, dropped: frozenset[bytes], known: Known | None = None
) -> tuple[bytes, dict[bytes, bytes]]:
    """The lines that are passed on; of what is dropped, the hops that it came over."""
    names, values = named(headers) if known is None else known
    form = names.form(dropped)
    if form is not None:
        at = form.connection
        if at < 0 or values[at].lower() in _OF_CONNECTION:
            return form.text % form.pick(values), _NO_HOPS
    return _looked_at(headers, dropped)


def _looked_at(headers: Headers, dropped: frozenset[bytes]) -> tuple[bytes, dict[bytes, bytes]]:
    """The same, line by line: some of them say what becomes of others."""
    parts: list[bytes] = []  # joined later, which takes half the time of formatting each line
    hops: dict[bytes, bytes] = {}
    for name, value in headers:
        lower = name.lower()
        if lower not in dropped:
            parts += (name, b": ", value, b"\r\n")
        elif lower == b"connection":
            named_here = _named_by_connection(headers)
            if not named_here <= dropped:
                return _looked_at(headers, dropped | named_here)
        elif lower in _WAYS:
            hops[lower] = hops.get(lower, b"") + value + b", "
    return b"".join(parts), hops


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
    known: Known | None = None,
) -> bytes:
    """The head sent to the engine. `body_bytes` is the length of the body that follows; `known`: what
    `named` says of the headers, where it was asked already.

    `Via` and `X-Forwarded-For` are added to, over all their lines: what a client claims there stays
    readable, and our own entry is always the last one.
    """
    lines, hops = _relayed(headers, _dropped_towards_engine(drop), known)
    length = b"" if not body_bytes and method in _BODILESS else b"content-length: %d\r\n" % body_bytes
    return b"%b %b HTTP/1.1\r\nhost: %b\r\n%b%bvia: %b1.1 kvgate\r\nx-forwarded-for: %b%b\r\n\r\n" % (
        method,
        target,
        host,
        lines,
        length,
        hops.get(b"via", b""),
        hops.get(b"x-forwarded-for", b""),
        peer,
    )


def response_head(status: int, phrase: bytes, headers: Headers, framing: bytes, added: bytes) -> bytes:
    """The head sent to the client. `framing` and `added` are whole header lines."""
    lines, _ = _looked_at(headers, _NOT_RELAYED)  # an engine sends few fields: to remember costs more
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
