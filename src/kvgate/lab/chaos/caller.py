"""One client connection of a chaos run: does what a `Plan` says and tells how it ended.

Promises: `call` always returns, and never leaves a connection open that it does not return for reuse.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from typing import cast

import httptools

from kvgate.lab.chaos.plan import Plan, request

GIVE_UP = 30.0


class Connection(asyncio.Protocol):
    """Frames answers; `news` is set at every event."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.is_closed = self.is_half_closed = False
        self.next_answer()

    def next_answer(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.events = 0
        self.is_whole = False
        self.is_ended = False  # the stream said [DONE]
        self.last = b""  # piece of the body, for complaints
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.abort()
        self.news.set()

    def eof_received(self) -> None:
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        framed = b"content-length" in self.headers or b"transfer-encoding" in self.headers
        if self.status and not framed and exc is None:
            self.is_whole = True
        self.is_closed = True
        self.news.set()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        # Both words have six bytes: with five from before, one over the seam is seen, and none twice.
        self.last = data
        seam = self._tail + data
        self.events += seam.count(b"data: ")
        self.is_ended = self.is_ended or b"[DONE]" in seam
        self._tail = seam[-5:]

    def on_message_complete(self) -> None:
        self.is_whole = True

    @property
    def can_be_reused(self) -> bool:
        """Both sides are open, and the gateway has not said that it closes."""
        is_open = not (self.is_closed or self.is_half_closed)
        return is_open and self.headers.get(b"connection", b"").lower() != b"close"

    async def until(self, holds: Callable[[], bool], within: float = GIVE_UP) -> bool:
        """Wait until `holds`, or the connection has ended, or time is up. True if it holds."""
        try:
            async with asyncio.timeout(within):
                while not holds() and not self.is_closed:
                    self.news.clear()
                    await self.news.wait()
        except TimeoutError:
            return False
        return holds()

    def leave(self, *, is_reset: bool) -> None:
        """Vanish: with RST (linger on, time 0) or with FIN."""
        if self.is_closed:
            return
        if is_reset:
            lent = self.transport.get_extra_info("socket")
            with socket.socket(fileno=os.dup(lent.fileno())) as own:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


async def connect(port: int) -> Connection:
    """A connection to the gateway, with a small receive buffer so that slow reading is felt."""
    sock = socket.socket()
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32768)
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_connect(sock, ("127.0.0.1", port))
        _, connection = await loop.create_connection(Connection, sock=sock)
    except BaseException:
        sock.close()
        raise
    return connection


async def call(plan: Plan, connection: Connection) -> str:
    """Send one request as planned. Returns "whole", "cut", "left", or "silent" after `GIVE_UP`."""
    connection.next_answer()
    head, body = request(plan)
    transport, leave = connection.transport, plan.leave
    if leave == "connected":
        return _left(plan, connection)
    if leave == "half a head":
        transport.write(head[: len(head) // 2])
        return _left(plan, connection)
    transport.write(head + (body[: len(body) // 2] if leave == "half a body" else body))
    if leave in ("sent", "half a body"):
        return _left(plan, connection)
    if leave in ("soon", "later"):
        if not await connection.until(lambda: connection.is_whole, plan.delay):
            return _left(plan, connection)
        return "whole"
    if leave == "half-closed" and not connection.is_closed:
        transport.write_eof()
        connection.is_half_closed = True
    await connection.until(lambda: connection.status != 0)
    if leave == "head":
        return _left(plan, connection)
    if plan.stall and not connection.is_closed:
        transport.pause_reading()
        await asyncio.sleep(plan.stall)
        if not connection.is_closed:
            transport.resume_reading()
    if leave in ("chunk", "last"):
        # "last" races the release: it goes when the end of the answer is in its hands.
        wanted = plan.leave_after if leave == "chunk" else plan.chunks
        await connection.until(lambda: connection.events >= wanted or connection.is_whole)
        return _left(plan, connection)
    is_over = await connection.until(lambda: connection.is_whole)
    if is_over:
        return "whole"
    return "cut" if connection.is_closed else "silent"


def _left(plan: Plan, connection: Connection) -> str:
    connection.leave(is_reset=plan.is_reset)
    return "left"
