"""One client connection: frames requests, keeps them in order, notices when the client has gone.

Promises: requests of one connection are answered one at a time and in order; a connection whose
framing is broken is answered once and closed; a client that vanishes ends its exchange at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, cast

import httptools

from kvgate.core.records import Reason, Refused
from kvgate.edge.relay.exchange import Exchange
from kvgate.edge.relay.heads import own_response
from kvgate.edge.relay.request import Request
from kvgate.wire.refusal import PHRASE, render

if TYPE_CHECKING:
    from kvgate.edge.gateway import Gateway

# nginx and Node refuse at 8 to 32 KiB; long API keys and traces need some room.
HEAD_BYTES_MAX = 64 * 1024
HEADERS_MAX = 256
# Requests that a client may have sent ahead of their turn.
PIPELINED_MAX = 32
# Writes beyond this pause the engine; it bounds the memory of a slow client.
WRITE_BUFFER_BYTES = 256 * 1024
# How long a refused upload is read and thrown away, so that its client can read the refusal.
LINGER_SECONDS = 5.0


class _Unacceptable(Exception):
    """Raised inside a parser callback to stop the parser."""


class ClientConnection(asyncio.Protocol):
    """The server side of one HTTP/1.1 connection."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.exchange: Exchange | None = None
        self.peer = b"unknown"
        self._parser = httptools.HttpRequestParser(self)
        self._arriving: Request | None = None
        self._queue: deque[Request] = deque()
        self._refusal: tuple[int, bytes, bytes] | None = None
        self._is_deaf = False  # what still comes is thrown away
        self._is_closed = False
        self._is_starting = False
        self._was_used = False
        self.since = 0.0  # loop time since when the client is idle, or its request arriving

    # --- what the exchange calls

    def write(self, data: bytes) -> None:
        if not self._is_closed:
            self.transport.write(data)

    def finished(self, *, keep_alive: bool) -> None:
        """The exchange has been answered whole."""
        self.exchange = None
        self._was_used = True
        self.since = self.gateway.loop.time()
        if self._is_closed:
            return
        if not keep_alive or self.gateway.is_draining:
            self._close()
        elif not self._is_starting:
            self._next()

    def break_off(self, *, is_visible: bool) -> None:
        """The answer cannot be finished. The client must not take it for a whole one."""
        self.exchange = None
        if self._is_closed:
            return
        if is_visible:
            self._close()  # flushes; the missing end of the framing tells the client
        else:
            self._is_closed = True
            self.transport.abort()

    def shut(self) -> None:
        """Close from outside: idle for too long, or the gateway stops."""
        if self.exchange is not None:
            self.exchange.client_gone()
            self.exchange = None
        if not self._is_closed:
            self._is_closed = True
            self.transport.abort()

    def sweep(self, now: float, limit: float) -> None:
        """Called now and then: ends what has been silent for too long."""
        if self.exchange is not None:
            self.exchange.sweep(now)
        elif now - self.since > limit:
            self._close()

    def close_if_idle(self) -> None:
        """Close a connection that was used and is not now. One that was never used may have a
        request on its way, which is owed an answer."""
        if self.exchange is None and self._was_used and self._arriving is None and not self._is_closed:
            self._close()

    # --- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because uvloop's transports do not derive from asyncio's.
        self.transport = transport = cast(asyncio.Transport, transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        peer = transport.get_extra_info("peername")
        if peer:
            self.peer = str(peer[0]).encode("ascii", "replace")
        self.since = self.gateway.loop.time()
        self.gateway.clients.add(self)

    def data_received(self, data: bytes) -> None:
        if self._is_deaf or self._is_closed:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # The request is whole; the offer to upgrade is declined by not taking it.
            self._is_deaf = True
            if self._queue:
                self._queue[-1].keep_alive = False
        except httptools.HttpParserError as error:
            self._is_deaf = True
            self._arriving = None  # up to a whole body, not to be kept while the refusal is read
            if self._refusal is None:
                detail = f"The request is not valid HTTP/1.1: {error}"
                self._refusal = render(Refused(Reason.INVALID_REQUEST, detail=detail))
                self.gateway.gate.refused(Reason.INVALID_REQUEST)
        if self.exchange is None and not self._is_starting:
            self._next()

    def eof_received(self) -> None:
        # A half-closed client is taken for gone, as common proxies do: holding KV cache for
        # somebody who may not be there costs everybody else.
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closed = True
        self.gateway.clients.discard(self)
        self._queue.clear()
        self._arriving = None
        if self.exchange is not None:
            self.exchange.client_gone()
            self.exchange = None

    def pause_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.pause()

    def resume_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.resume()

    # --- llhttp

    def on_message_begin(self) -> None:
        if len(self._queue) >= PIPELINED_MAX:
            raise _Unacceptable("too many pipelined requests")
        self._arriving = Request()
        self.since = self.gateway.loop.time()

    def on_url(self, url: bytes) -> None:
        request = self._request()
        request.target += url
        self._count_head(request, len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        request = self._request()
        if request.pieces:
            return  # a trailer of the request; the body is sent on with its length instead
        request.headers.append((name, value))
        self._count_head(request, len(name) + len(value) + 4)

    def on_headers_complete(self) -> None:
        request = self._request()
        request.method = self._parser.get_method()
        request.is_http11 = self._parser.get_http_version() == "1.1"
        for name, value in request.headers:
            lower = name.lower()
            if lower == b"content-length":
                # llhttp has made sure that it is a number, and the only one.
                self._check_size(int(value))
            elif lower == b"expect" and value.lower() == b"100-continue":
                request.wants_continue = True
        if request.wants_continue and self.exchange is None and not self._queue:
            request.wants_continue = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, piece: bytes) -> None:
        request = self._request()
        request.body_bytes += len(piece)
        self._check_size(request.body_bytes)
        request.pieces.append(piece)

    def on_message_complete(self) -> None:
        request = self._request()
        self._arriving = None
        request.body = b"".join(request.pieces)
        request.pieces = []
        # HTTP/1.0 keep-alive is rare, and its answers would need a length that streams lack.
        request.keep_alive = request.is_http11 and self._parser.should_keep_alive()
        self._queue.append(request)

    # --- inside

    def _request(self) -> Request:
        if self._arriving is None:
            raise _Unacceptable("bytes outside of a request")
        return self._arriving

    def _count_head(self, request: Request, size: int) -> None:
        request.head_bytes += size
        if request.head_bytes > HEAD_BYTES_MAX or len(request.headers) > HEADERS_MAX:
            detail = f"The request head is larger than {HEAD_BYTES_MAX} bytes or {HEADERS_MAX} fields."
            _, headers, body = render(Refused(Reason.INVALID_REQUEST, detail=detail))
            self._refusal = (431, headers, body)
            self.gateway.gate.refused(Reason.INVALID_REQUEST)
            raise _Unacceptable(detail)

    def _check_size(self, size: int) -> None:
        limit = self.gateway.settings.max_body_bytes
        if size > limit:
            detail = f"The body is larger than {limit} bytes, the limit of this gateway (--max-body-bytes)."
            self._refusal = render(Refused(Reason.BODY_TOO_LARGE, detail=detail))
            self.gateway.gate.refused(Reason.BODY_TOO_LARGE)
            raise _Unacceptable(detail)

    def _next(self) -> None:
        """Start what has arrived, in order, until one has to wait."""
        self._is_starting = True
        try:
            while self._queue and self.exchange is None and not self._is_closed:
                request = self._queue.popleft()
                self.exchange = Exchange(self.gateway, self, request)
                self.exchange.start()
        finally:
            self._is_starting = False
        if self.exchange is not None or self._is_closed:
            return
        if self._refusal is not None:
            status, headers, body = self._refusal
            self._refusal = None
            self.write(own_response(status, PHRASE[status], headers, body, close=True))
            self._linger()
        elif self._arriving is not None and self._arriving.wants_continue:
            self._arriving.wants_continue = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _linger(self) -> None:
        """Closing with unread bytes would reset the connection and may lose the answer."""
        self._is_deaf = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.gateway.loop.call_later(LINGER_SECONDS, self._close)

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.transport.close()
