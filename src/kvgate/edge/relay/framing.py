"""Bytes of one client into whole requests, or into one refusal: what may be read in two ways is refused.

Framing is llhttp's, without any of its lenient flags. It accepts some things that engines and proxies
disagree on; those are refused here (docs/operations.md has the list). Promises: a request handed over
is whole and has one reading, and its body is counted in `gateway.bodies` (whoever gets it gives it
back); memory is bounded for every field, body and trailer; after a refusal nothing more is handed
over. It writes nothing and knows neither the gate nor the engine.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import httptools

from kvgate.core.records import Reason, Refused
from kvgate.edge.relay.heads import Headers, named
from kvgate.edge.relay.host import Host
from kvgate.edge.relay.request import Request

# nginx and Node refuse at 8 to 32 KiB; long API keys and traces need some room.
HEAD_BYTES_MAX = 64 * 1024
HEADERS_MAX = 256
# A head comes in one or two packets; 10 s are for the worst radio link.
HEAD_SECONDS = 10.0
# A body may be slow for its first seconds; then it must come at this rate, in bytes a second.
BODY_GRACE_SECONDS = 10.0
BODY_RATE_MIN = 1024
# Until bodies of other requests have been sent on, which takes the engine a moment each.
MEMORY_RETRY_SECONDS = 2.0
_let_fall = deque[tuple[bytes, bytes]](maxlen=0).append  # takes anything, keeps nothing


class Unacceptable(Exception):
    """Why a request is refused. Raised inside a parser callback, it stops the parser."""

    def __init__(self, detail: str, status: int = 400, reason: Reason = Reason.INVALID_REQUEST) -> None:
        super().__init__(detail)
        retry = MEMORY_RETRY_SECONDS if reason.is_busy else None
        self.refused = Refused(reason, retry_after=retry, detail=detail)
        self.status = status


class Owner(Protocol):
    """Who gets the requests of a connection."""

    def head_arrived(self, request: Request) -> None: ...
    def arrived(self, request: Request) -> None: ...


class RequestReader:
    """The framing of one connection."""

    __deletable__ = ("_owner", "_parser")  # mypyc asks for it
    __slots__ = (
        *("_add", "_gateway", "_is_head_done", "_offer", "_owner", "_parser", "_unmoved"),
        *("arriving", "since"),
    )

    def __init__(self, gateway: Host, owner: Owner) -> None:
        self._gateway = gateway
        self._owner = owner
        self._parser = httptools.HttpRequestParser(self)
        self._is_head_done = False
        self._add = _let_fall  # what is done with a field
        self._offer: Request | None = None  # asked for another protocol
        self._unmoved = 0  # bytes fed since something came of them: bounds what the parser keeps
        self.arriving: Request | None = None
        self.since = 0.0  # loop time of the arriving request's first byte

    def feed(self, data: bytes) -> Unacceptable | None:
        """Read on. A refusal is the last word: feed nothing more."""
        self._unmoved += len(data)
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                data = self._declined(data, int(offer.args[0]))
                continue
            except httptools.HttpParserError as error:
                self.drop()
                # What a callback raised, or what llhttp itself found.
                cause = error.__context__
                if isinstance(cause, Unacceptable):
                    # Its frames would keep the request, in a circle that only the collector opens.
                    return cause.with_traceback(None)
                return Unacceptable(f"The request is not valid HTTP/1.1: {error}")
            break
        if self._unmoved > HEAD_BYTES_MAX:
            self.drop()
            return _too_large_a_head()
        return None

    def late(self, now: float, limit: float) -> Unacceptable | None:
        """Whether the arriving request takes too long: `limit` seconds for all of it, less for its head."""
        request = self.arriving
        if request is None:
            return None
        age = now - self.since
        if not self._is_head_done and age > min(limit, HEAD_SECONDS):
            return Unacceptable("The head of the request did not arrive in time.", 408)
        if age > limit:
            return Unacceptable(f"The request did not arrive within {limit:g} s (--client-timeout).", 408)
        if self._is_head_done and request.body_bytes < (age - BODY_GRACE_SECONDS) * BODY_RATE_MIN:
            return Unacceptable(f"The body comes at less than {BODY_RATE_MIN} bytes a second.", 408)
        return None

    def close(self) -> None:
        """The connection has gone: open the circles that only the collector would open."""
        self.drop()
        del self._parser, self._owner

    def drop(self) -> None:
        """Let go of what has arrived of an unfinished request."""
        request, self.arriving = self.arriving, None
        self._add = _let_fall
        if request is not None:
            self._gateway.bodies.give(request.body_bytes)

    # --- llhttp

    def on_message_begin(self) -> None:
        self.arriving = request = Request()
        self._is_head_done = False
        self._add = request.headers.append
        self.since = self._gateway.loop.time()

    def on_url(self, url: bytes) -> None:
        (self.arriving or self._request()).target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        # No more than this, for it runs for each field. Sizes are looked at when the head is whole;
        # until then `_unmoved` bounds it.
        self._add((name, value))

    def on_headers_complete(self) -> None:
        request = self.arriving or self._request()
        self._unmoved = 0
        self._is_head_done = True
        self._add = _let_fall  # a trailer; the body is sent on with its length instead
        request.method = self._parser.get_method()
        version = self._parser.get_http_version()
        if version != "1.1":
            if version != "1.0":
                raise Unacceptable("This gateway speaks HTTP/1.1.", 505)
            request.is_http11 = False
        if self._parser.should_upgrade():
            if request.method == b"CONNECT":
                raise Unacceptable("CONNECT is for proxies; this is a gateway.", 405)
            self._offer = request
            return
        if not request.target.startswith(b"/"):
            request.target = self._origin_form(request)
        self._check_fields(request)
        self._owner.head_arrived(request)

    def on_body(self, piece: bytes) -> None:
        request = self.arriving or self._request()
        self._unmoved = 0
        size = len(piece)
        request.body_bytes = so_far = request.body_bytes + size
        gateway = self._gateway
        if so_far > gateway.settings.max_body_bytes or not gateway.bodies.take(size):
            request.body_bytes -= size  # it was not taken
            self._check_size(so_far)
            raise self._no_memory()
        request.pieces.append(piece)

    def on_message_complete(self) -> None:
        request = self.arriving or self._request()
        self._unmoved = 0
        self.arriving = None
        if self._offer is not None:
            return
        request.body = b"".join(request.pieces)
        request.pieces.clear()
        # HTTP/1.0 keep-alive is rare, and its answers would need a length that streams lack.
        request.keep_alive = request.is_http11 and self._parser.should_keep_alive()
        self._owner.arrived(request)

    # --- what llhttp lets through

    def _check_fields(self, request: Request) -> None:
        headers = request.headers
        request.known = names, values = named(headers)
        size = len(request.target) + 4 * len(headers) + names.size + len(b"".join(values))
        if size > HEAD_BYTES_MAX or len(headers) > HEADERS_MAX:
            raise _too_large_a_head()
        if names.length >= 0:
            # llhttp has made sure that it is a number, and the only one.
            length = int(values[names.length])
            self._check_size(length)
            if not self._gateway.bodies.has_room(length):
                raise self._no_memory()
        if not names.is_plain:
            self._check_rare_fields(request)

    def _check_rare_fields(self, request: Request) -> None:
        fields = {name.lower(): value for name, value in request.headers}
        if b"transfer-encoding" in fields:
            self._check_coding(request)
        if b"expect" in fields:
            request.wants_continue = fields[b"expect"].lower() == b"100-continue"
        hosts = len(_lines(b"host", request.headers))
        if hosts > 1 or (not hosts and request.is_http11):
            raise Unacceptable("A request has one Host field.")

    def _check_coding(self, request: Request) -> None:
        if not request.is_http11:
            raise Unacceptable("HTTP/1.0 has no Transfer-Encoding.")
        for value in _lines(b"transfer-encoding", request.headers):
            if value.strip(b" \t").lower() != b"chunked":
                raise Unacceptable("Of the transfer codings only chunked is read here.", 501)

    def _origin_form(self, request: Request) -> bytes:
        """The target as `/path?query`. A proxy's form is understood, as RFC 9112 3.2.2 asks."""
        target = request.target
        if target == b"*" and request.method == b"OPTIONS":
            return target
        scheme, _, rest = target.partition(b"://")
        if scheme.lower() not in (b"http", b"https") or not rest:
            raise Unacceptable("The target of a request is a path.")
        ends = [at for at in (rest.find(b"/"), rest.find(b"?"), rest.find(b"#")) if at >= 0]
        path = rest[min(ends) :] if ends else b""
        return path if path.startswith(b"/") else b"/" + path

    def _declined(self, data: bytes, end: int) -> bytes:
        """An offer to speak another protocol is not taken: the request is read as if without it.

        llhttp stops at such a head without reading the body; it is given the head again, less the offer.
        """
        request, self._offer = self._offer, None
        if request is None:
            raise AssertionError("the parser stops only at an offer that was kept")
        version = b"1.1" if request.is_http11 else b"1.0"
        lines = [b"%s %s HTTP/%s\r\n" % (request.method, request.target, version)]
        lines += [b"%s: %s\r\n" % field for field in request.headers if field[0].lower() != b"upgrade"]
        self._parser = httptools.HttpRequestParser(self)
        return b"".join([*lines, b"\r\n", data[end:]])

    # --- limits

    def _request(self) -> Request:
        if self.arriving is None:
            raise Unacceptable("bytes outside of a request")
        return self.arriving

    def _check_size(self, size: int) -> None:
        limit = self._gateway.settings.max_body_bytes
        if size > limit:
            detail = f"The body is larger than {limit} bytes, the limit of this gateway (--max-body-bytes)."
            raise Unacceptable(detail, 413, Reason.BODY_TOO_LARGE)

    def _no_memory(self) -> Unacceptable:
        limit, status = self._gateway.bodies.limit, self._gateway.settings.busy_status
        detail = f"The gateway holds request bodies of {limit} bytes in all, its limit (--body-memory)."
        return Unacceptable(detail, status, Reason.QUEUE_FULL)


def _lines(wanted: bytes, headers: Headers) -> list[bytes]:
    return [value for name, value in headers if name.lower() == wanted]


def _too_large_a_head() -> Unacceptable:
    detail = f"The request head is larger than {HEAD_BYTES_MAX} bytes or {HEADERS_MAX} fields."
    return Unacceptable(detail, 431)
