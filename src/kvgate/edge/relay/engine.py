"""One connection to the engine: writes a request, frames its response.

Promises to its `Receiver`: `head` at most once, then `data` any number of times, then exactly one
of `done` and `failed`; nothing after `abort`. Bytes behind the end of a response are never
delivered: they would be a second response that nobody asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, cast

import httptools

from kvgate.edge.relay.heads import Headers

HEAD_BYTES_MAX = 64 * 1024
_HEAD_END = b"\r\n\r\n"


class _Unreadable(Exception):
    """Raised inside a parser callback to stop the parser."""


class Receiver(Protocol):
    """Who gets a response."""

    def head(self, status: int, phrase: bytes, headers: Headers, framing: str) -> RawReceiver | None:
        """`framing` is chunked, length or close. What is returned gets the body's bytes raw, with
        their chunk framing and trailers; None: this gets its content."""

    def data(self, piece: bytes) -> None: ...

    def done(self) -> None: ...

    def failed(self, why: str) -> None: ...


class RawReceiver(Receiver, Protocol):
    """Who gets a body with its framing."""

    def passed(self, piece: bytes) -> bool:
        """Take a piece that is one whole chunk, and not the last one, of a body that stands between
        two chunks: then nobody else needs to see it. False: not such a piece, and not taken."""


class EngineConnection(asyncio.Protocol):
    """An HTTP/1.1 client connection, for one request at a time."""

    __slots__ = (
        *("_before_body", "_complete", "_extra", "_framing", "_headers", "_interim", "_is_head"),
        *("_keep_alive", "_now", "_parser", "_phrase", "_pieces", "_pool", "_raw", "_receiver"),
        *("got_bytes", "idle_since", "is_closed", "last_byte", "requests", "transport"),
    )
    transport: asyncio.Transport

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._now: Callable[[], float] = pool.loop.time
        self._receiver: Receiver | None = None
        self.is_closed = False
        self.requests = 0
        self.idle_since = 0.0
        self.last_byte = self._now()  # loop time of the latest byte, or of the request
        self.got_bytes = False
        self._pieces: list[bytes] = []
        self._parser: Any = None
        self._extra = False  # then the connection is not used again
        self._raw: RawReceiver | None = None
        self._keep_alive = False  # each answer says

    # --- what the owner calls

    def send(self, request: bytes, receiver: Receiver, *, is_head: bool) -> None:
        """Write one request. The connection belongs to `receiver` until `done` or `failed`."""
        self._receiver = receiver
        self._is_head = is_head
        self._phrase = b""
        self._headers: Headers = []
        self._framing = "close"
        self._interim = 0
        self._before_body: bytes | None = b""
        self._complete = False
        self._raw = None
        self.got_bytes = False
        self.requests += 1
        self.last_byte = self._now()
        self.transport.write(request)

    def abort(self) -> None:
        """Drop the connection and the request on it. The receiver hears nothing more."""
        self._receiver = self._raw = None
        self.is_closed = True
        self.transport.abort()

    def abandon(self, receiver: Receiver) -> None:
        """Drop the connection if it still works for `receiver`, and only then."""
        if self._receiver is receiver:
            self.abort()

    def drop(self) -> None:
        """Abort a connection that may not have been made yet."""
        if hasattr(self, "transport"):
            self.abort()
        self.is_closed = True

    # --- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because uvloop's transports do not derive from asyncio's.
        self.transport = cast(asyncio.Transport, transport)
        # Reads one answer after the other. It knows this object: dropped with the connection.
        self._parser = httptools.HttpResponseParser(self)
        if self.is_closed:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        raw = self._raw
        if raw is not None and raw.passed(data):
            # The usual piece of a stream. The parser would stand where it stands now.
            self.last_byte = self._now()
            return
        receiver = self._receiver
        if receiver is None:
            # An idle engine connection has nothing to say; what comes could poison the next answer.
            self.abort()
            return
        self.got_bytes = True
        self.last_byte = self._now()
        before = self._before_body
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._receiver is None:
                return
            self._fail(f"the engine's answer is not HTTP/1.1: {error}")
            return
        if before is None and self._raw is not None and not self._complete:
            # In the middle of a body no callback that could have changed anything has run.
            receiver.data(data)
            return
        if self._receiver is None:
            return
        if self._extra:
            self._fail("the engine sent bytes after its answer")
            return
        if before is not None:
            # The head has not ended before this piece.
            whole = before + data if before else data
            if self._before_body is not None:
                if len(whole) > HEAD_BYTES_MAX:
                    self._fail("the engine's answer has too large a head")
                else:
                    self._before_body = whole
                return
            if self._raw is not None:
                data = self._after_head(whole)
        if self._raw is not None:
            receiver.data(data)
        elif self._pieces:
            piece = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces.clear()
            receiver.data(piece)
        elif before is not None:
            receiver.data(b"")
        if self._complete and self._receiver is not None:
            self._finish(reuse=self._keep_alive)

    def eof_received(self) -> None:
        return None  # close the transport; connection_lost says what it means

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        self._pool.lost(self)
        self._parser = None
        if self._receiver is None:
            return
        if exc is None and self._before_body is None and self._framing == "close":
            self._finish(reuse=False)
        else:
            self._fail(str(exc) if exc else "the engine closed the connection")

    def pause_writing(self) -> None:
        """The request is one write, bounded by the body limit; there is nothing to hold back."""

    def resume_writing(self) -> None:
        pass

    # --- llhttp

    def on_message_begin(self) -> None:
        if self._complete:
            self._extra = True

    def on_status(self, phrase: bytes) -> None:
        self._phrase += phrase

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._before_body is not None:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._complete or status < 200:
            return
        for name, value in self._headers:
            length = len(name)  # compared first, because it is cheaper
            if length == 17 and name.lower() == b"transfer-encoding":
                if value.strip(b" \t").lower() != b"chunked" or self._framing == "chunked":
                    # Passed on, it would be read in another way than it was meant.
                    raise _Unreadable("a transfer coding other than chunked")
                self._framing = "chunked"
            elif length == 14 and name.lower() == b"content-length" and self._framing == "close":
                self._framing = "length"
        if self._is_head or status in (204, 304):
            self._framing = "length"
        self._before_body = None
        if self._receiver is not None:
            self._raw = self._receiver.head(status, self._phrase, self._headers, self._framing)
            if self._is_head:
                self._complete = True

    def on_body(self, piece: bytes) -> None:
        if self._raw is None:
            self._pieces.append(piece)

    def on_message_complete(self) -> None:
        if self._before_body is not None:
            # An interim answer (100, 103) ended; the real one follows.
            self._interim += 1
            self._headers = []
            self._phrase = b""
            return
        self._complete = True
        # Asked here: llhttp forgets the framing right after, and would say no.
        self._keep_alive = self._parser.should_keep_alive()

    # --- endings

    def _after_head(self, whole: bytes) -> bytes:
        found = whole.find(_HEAD_END)
        for _ in range(self._interim):
            found = whole.find(_HEAD_END, found + 4) if found >= 0 else found
        return whole[found + 4 :] if found >= 0 else b""

    def _finish(self, *, reuse: bool) -> None:
        receiver = self._receiver
        self._receiver = self._raw = None
        if reuse and not self._is_head and not self.is_closed:
            self._pool.idle(self)
        elif not self.is_closed:
            self.is_closed = True
            self.transport.close()
        if receiver is not None:
            receiver.done()

    def _fail(self, why: str) -> None:
        receiver = self._receiver
        self._receiver = self._raw = None
        if not self.is_closed:
            self.is_closed = True
            self.transport.abort()
        if receiver is not None:
            receiver.failed(why)
