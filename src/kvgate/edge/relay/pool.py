"""Connections to one engine: kept alive, handed out, and made when there is none.

Also `fetch`, the whole answer of one small request, for counting calls and health probes.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvgate.edge.relay.engine import EngineConnection
from kvgate.edge.relay.heads import Headers

IDLE_CONNECTIONS_MAX = 64
FETCH_BYTES_MAX = 64 * 1024 * 1024


class EngineUnavailable(ConnectionError):
    """The engine could not be reached, or broke off; the message says how."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A whole answer."""

    status: int
    phrase: bytes
    headers: Headers
    body: bytes


class EnginePool:
    """Connections to the engine at one `http://host:port`."""

    def __init__(
        self, url: str, loop: asyncio.AbstractEventLoop, *, connect_timeout: float, idle_timeout: float
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"an upstream is http://HOST:PORT, got {url!r}")
        self.loop = loop
        self.host = parts.hostname
        self.port = parts.port or 80
        self.prefix = parts.path.rstrip("/").encode("ascii")
        self.authority = parts.netloc.rpartition("@")[2].encode("idna" if parts.netloc.isascii() else "utf-8")
        self._connect_timeout = connect_timeout
        self._idle_timeout = idle_timeout
        self._idle: list[EngineConnection] = []
        self._open: set[EngineConnection] = set()
        self.is_up = True

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
            async with asyncio.timeout(self._connect_timeout):
                await self.loop.create_connection(lambda: connection, self.host, self.port)
        except TimeoutError:
            connection.drop()
            self.is_up = False
            raise EngineUnavailable(f"no connection within {self._connect_timeout:g} s") from None
        except OSError as error:
            self.is_up = False
            raise EngineUnavailable(str(error)) from None
        except asyncio.CancelledError:
            # It may have been made in the very moment in which nobody wants it any more.
            connection.drop()
            raise
        self._open.add(connection)
        self.is_up = True
        return connection

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

    def idle(self, connection: EngineConnection) -> None:
        """A connection's answer has ended and it can be used again."""
        connection.idle_since = self.loop.time()
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

    def head(self, status: int, phrase: bytes, headers: Headers, framing: str) -> bool:
        self._status, self._phrase, self._headers = status, phrase, headers
        return False

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
