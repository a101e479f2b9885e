"""Connections to one engine: kept alive, handed out, and made when there is none.

Also `fetch`, the whole answer of one small request, for counting calls and health probes.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass

from kvgate.edge.relay.engine import EngineConnection
from kvgate.edge.relay.heads import Headers
from kvgate.edge.relay.upstream import Upstream, reason_of
from kvgate.edge.upstreams.access import OPEN

IDLE_CONNECTIONS_MAX = 64
FETCH_BYTES_MAX = 64 * 1024 * 1024


class EngineUnavailable(Exception):
    """The engine could not be reached, or broke off; the message says how."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A whole answer."""

    status: int
    phrase: bytes
    headers: Headers
    body: bytes


class EnginePool:
    """Connections to the engine at one address (`upstream.FORMS`)."""

    def __init__(
        self,
        url: str,
        loop: asyncio.AbstractEventLoop,
        *,
        connect_timeout: float,
        idle_timeout: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.upstream = Upstream.parse(url)
        if self.upstream.is_tls and tls is None:
            raise ValueError(f"{url} needs a TLS context that says whom to trust")
        self.loop = loop
        self.url = url
        self.prefix = self.upstream.prefix
        self.authority = self.upstream.authority
        self.access = OPEN  # the key that the engine asks for, and when it is sent
        self.connect_timeout = connect_timeout
        self._tls = tls
        self._idle_timeout = idle_timeout
        self._idle: list[EngineConnection] = []
        self._open: set[EngineConnection] = set()
        self.is_up = True
        self.last_error: str | None = None  # with the address: for the operator, not for clients

    @property
    def open_connections(self) -> int:
        return len(self._open)

    def take_idle(self) -> EngineConnection | None:
        """A connection that was used lately, or None."""
        limit = self.loop.time() - self._idle_timeout
        while self._idle:
            connection = self._idle.pop()
            if connection.is_closed:
                continue
            if connection.idle_since >= limit:
                return connection
            connection.abort()
        return None

    async def connect(self) -> EngineConnection:
        """A new connection. Raises `EngineUnavailable`."""
        connection = EngineConnection(self)
        try:
            async with asyncio.timeout(self.connect_timeout):
                await self.upstream.open(self.loop, lambda: connection, self._tls)
        except TimeoutError as late:
            connection.drop()
            if late.errno:  # the system's own time-out
                raise self._unreachable(reason_of(late)) from None
            raise self._unreachable(f"no connection within {self.connect_timeout:g} s") from None
        except OSError as error:
            connection.drop()
            raise self._unreachable(reason_of(error)) from None
        except BaseException:
            # It may have been made in the very moment in which nobody wants it any more.
            connection.drop()
            raise
        self._open.add(connection)
        self.is_up = True
        self.last_error = None
        return connection

    def _unreachable(self, why: str) -> EngineUnavailable:
        self.is_up = False
        self.last_error = f"{self.url}: {why}"
        return EngineUnavailable(why)

    async def fetch(self, request: bytes) -> Fetched:
        """Send a whole request and collect the answer. Raises `EngineUnavailable`.

        Cancelling drops the connection. The caller bounds the time.
        """
        while True:
            connection = self.take_idle()
            was_idle = connection is not None
            if connection is None:
                connection = await self.connect()
            collector = _Collector(self.loop)
            connection.send(request, collector, is_head=False)
            try:
                return await collector.future
            except EngineUnavailable:
                # The engine may close an idle connection just as it is used; these calls are safe.
                if not was_idle or connection.got_bytes:
                    raise
            except asyncio.CancelledError:
                # The answer may have come in the same moment; then the connection is idle, or
                # somebody else's, by now.
                connection.abandon(collector)
                raise
            finally:
                # What failed keeps its traceback, whose frames would keep it.
                del collector

    def idle(self, connection: EngineConnection) -> None:
        """A connection's answer has ended and it can be used again."""
        connection.idle_since = connection.last_byte  # just now
        connection.transport.resume_reading()
        if len(self._idle) < IDLE_CONNECTIONS_MAX:
            self._idle.append(connection)
        else:
            connection.abort()

    def lost(self, connection: EngineConnection) -> None:
        self._open.discard(connection)

    def sweep(self) -> None:
        """Close connections that have been idle for too long."""
        limit = self.loop.time() - self._idle_timeout
        fresh = []
        for connection in self._idle:
            if connection.is_closed:
                continue
            if connection.idle_since >= limit:
                fresh.append(connection)
            else:
                connection.abort()
        self._idle = fresh

    def close(self) -> None:
        """Drop every connection."""
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()


class _Collector:
    """Receives one answer whole."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[Fetched] = loop.create_future()
        self._status = 0
        self._phrase = b""
        self._headers: Headers = []
        self._pieces: list[bytes] = []
        self._bytes = 0

    def head(self, status: int, phrase: bytes, headers: Headers, framing: str) -> None:
        self._status, self._phrase, self._headers = status, phrase, headers

    def data(self, piece: bytes) -> None:
        self._bytes += len(piece)
        if self._bytes > FETCH_BYTES_MAX:
            self.failed("the answer is too large")
            return
        self._pieces.append(piece)

    def done(self) -> None:
        if not self.future.done():
            self.future.set_result(Fetched(self._status, self._phrase, self._headers, b"".join(self._pieces)))

    def failed(self, why: str) -> None:
        if not self.future.done():
            self.future.set_exception(EngineUnavailable(why))
