"""One client connection: keeps its requests in order, notices when the client has gone or takes nothing.

Promises: requests of one connection are answered one at a time and in order; a connection whose
framing is broken is answered once and closed; a client that vanishes ends its exchange at once, one
that takes nothing of what waits for it after `client_idle_timeout`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from http import HTTPStatus
from typing import cast

from kvgate.core.records import Reason, Refused
from kvgate.edge.relay.exchange import Exchange
from kvgate.edge.relay.framing import RequestReader, Unacceptable
from kvgate.edge.relay.heads import own_response
from kvgate.edge.relay.host import Host
from kvgate.edge.relay.request import Request
from kvgate.wire.refusal import PHRASE, render

# Requests that a client may have sent ahead of their turn.
PIPELINED_MAX = 32
# Writes beyond this pause the engine; it bounds the memory of a slow client.
WRITE_BUFFER_BYTES = 256 * 1024
# How long a refused upload is read and thrown away, so that its client can read the refusal.
LINGER_SECONDS = 5.0
# Connections above the limit that are answered, and not only closed.
TURNED_AWAY_MAX = 64
TURNED_AWAY_RETRY = 5.0


class ClientConnection(asyncio.Protocol):
    """The server side of one HTTP/1.1 connection."""

    __slots__ = (
        *("_held", "_is_closed", "_is_deaf", "_is_starting", "_queue", "_reader", "_refusal"),
        *("_taken", "_taken_at", "_was_used", "_written"),
        *("exchange", "gateway", "peer", "since", "transport"),
    )
    transport: asyncio.Transport

    def __init__(self, gateway: Host) -> None:
        self.gateway = gateway
        self.exchange: Exchange | None = None
        self.peer = b"unknown"
        self._reader = RequestReader(gateway, self)
        self._queue: deque[Request] = deque()
        self._refusal: bytes | None = None
        self._held = 0  # bytes of the body of the exchange that runs, until it is answered
        self._is_deaf = False  # what still comes is thrown away
        self._is_closed = False
        self._is_starting = False
        self._was_used = False
        self._written = self._taken = 0  # bytes
        self._taken_at = 0.0  # loop time at which the client was last seen to take something
        self.since = 0.0  # loop time since when the client is idle

    # --- what the exchange calls

    def write(self, data: bytes) -> None:
        if not self._is_closed:
            self._written += len(data)
            self.transport.write(data)
        if self._held:
            self._let_go()  # an answer has begun, so the body will not be sent again

    def write_ahead(self, data: bytes) -> None:
        """What comes before the answer has begun: the body is still needed."""
        if not self._is_closed:
            self._written += len(data)
            self.transport.write(data)

    def finished(self, *, keep_alive: bool) -> None:
        """The exchange has been answered whole."""
        self._exchange_over()
        self._was_used = True
        self.since = self.gateway.loop.time()
        if self._is_closed:
            return
        if not keep_alive or self.gateway.is_draining:
            self._close()
        elif not self._is_starting and (
            self._queue or self._refusal is not None or self._reader.arriving is not None
        ):
            self._next()  # otherwise nothing has come yet

    def break_off(self, *, is_visible: bool) -> None:
        """The answer cannot be finished. The client must not take it for a whole one."""
        self._exchange_over()
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
            self._exchange_over()
        self._is_closed = True
        self.transport.abort()

    def sweep(self, now: float) -> None:
        """Called now and then: ends what has been silent, or deaf, for too long."""
        settings = self.gateway.settings
        if self._takes_nothing(now, settings.client_idle_timeout):
            self.shut()
        elif self.exchange is not None:
            self.exchange.sweep(now)
        elif not self._is_deaf and not self._is_closed:
            limit = settings.client_timeout
            late = self._reader.late(now, limit)
            if late is not None:
                self._refuse(late)
                self._next()
            elif self._reader.arriving is None and now - self.since > limit:
                self._close()

    def close_if_idle(self) -> None:
        """Close a connection that was used and is not now. One that was never used may have a
        request on its way, which is owed an answer."""
        if self.exchange is None and self._was_used and self._reader.arriving is None:
            self._close()

    @property
    def is_flushed(self) -> bool:
        """True once the system has all that was written."""
        return self.transport.get_write_buffer_size() == 0

    # --- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because uvloop's transports do not derive from asyncio's.
        self.transport = transport = cast(asyncio.Transport, transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        peer = transport.get_extra_info("peername")
        if peer:
            self.peer = str(peer[0]).encode("ascii", "replace")
        gateway = self.gateway
        self.since = self._taken_at = gateway.loop.time()
        others = len(gateway.clients)
        gateway.clients.add(self)
        if others >= gateway.connections_max:
            self._turn_away(others - gateway.connections_max)

    def data_received(self, data: bytes) -> None:
        if self._is_deaf or self._is_closed:
            return
        refused = self._reader.feed(data)
        if refused is not None:
            self._refuse(refused)
        if self.exchange is None and not self._is_starting:
            self._next()

    def eof_received(self) -> None:
        # A half-closed client is taken for gone, as common proxies do: holding KV cache for
        # somebody who may not be there costs everybody else.
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closed = True
        self.gateway.clients.discard(self)
        self._reader.close()
        while self._queue:
            self.gateway.bodies.give(self._queue.popleft().body_bytes)
        if self.exchange is not None:
            self.exchange.client_gone()
            self._exchange_over()

    def pause_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.pause()

    def resume_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.resume()

    # --- what the reader calls

    def head_arrived(self, request: Request) -> None:
        if len(self._queue) >= PIPELINED_MAX:
            raise Unacceptable(f"More than {PIPELINED_MAX} requests were sent ahead of their answers.")
        if request.wants_continue and self.exchange is None and not self._queue:
            self._continue(request)

    def arrived(self, request: Request) -> None:
        self._queue.append(request)

    # --- inside

    def _next(self) -> None:
        """Start what has arrived, in order, until one has to wait."""
        self._is_starting = True
        try:
            while self._queue and self.exchange is None and not self._is_closed:
                request = self._queue.popleft()
                self._held = request.body_bytes
                self.exchange = Exchange(self.gateway, self, request)
                self.exchange.start()
        finally:
            self._is_starting = False
        if self.exchange is not None or self._is_closed:
            return
        arriving = self._reader.arriving
        if self._refusal is not None:
            self.write(self._refusal)
            self._refusal = None
            self._linger()
        elif arriving is not None and arriving.wants_continue:
            self._continue(arriving)

    def _continue(self, request: Request) -> None:
        request.wants_continue = False
        self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _refuse(self, why: Unacceptable) -> None:
        """The last answer of this connection, once those before it are given."""
        self._is_deaf = True
        self._reader.drop()  # up to a whole body, not to be kept while the refusal is read
        self._refusal = self._rendered(why.refused, why.status)

    def _turn_away(self, others: int) -> None:
        """There are as many connections as the gateway carries."""
        self._is_deaf = True
        if others >= TURNED_AWAY_MAX:
            self.shut()
            return
        limit = self.gateway.connections_max
        retry = TURNED_AWAY_RETRY
        detail = f"The gateway has {limit} connections, as many as it takes (--max-connections)."
        self.write(self._rendered(Refused(Reason.QUEUE_FULL, retry_after=retry, detail=detail), 503))
        self._linger()

    def _rendered(self, refused: Refused, status: int) -> bytes:
        self.gateway.gate.refused(refused.reason)
        _, headers, body = render(refused)
        phrase = PHRASE.get(status) or HTTPStatus(status).phrase
        return own_response(status, phrase, headers, body, close=True)

    def _takes_nothing(self, now: float, limit: float) -> bool:
        waiting = self.transport.get_write_buffer_size()
        taken = self._written - waiting
        if waiting == 0 or taken != self._taken:
            self._taken, self._taken_at = taken, now
            return False
        return now - self._taken_at > limit

    def _exchange_over(self) -> None:
        self.exchange = None
        if self._held:
            self._let_go()

    def _let_go(self) -> None:
        self.gateway.bodies.give(self._held)
        self._held = 0

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
