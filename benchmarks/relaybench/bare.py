"""The floor: a proxy that only forwards, on the same loop and the same kind of protocol as kvgate.

    python bare.py PORT ENGINE_PORT

It looks for where a message ends and does nothing else: no header is checked, dropped or added, no
fault is answered. What kvgate costs above it is what kvgate does.
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import cast

import uvloop

LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.I)


class Message:
    """Where one message ends: at its length, or at its last chunk."""

    def __init__(self) -> None:
        self.head = b""
        self.left: int | None = None

    def ends_with(self, data: bytes) -> bool:
        if self.left is None:
            self.head += data
            end = self.head.find(b"\r\n\r\n")
            if end < 0:
                return False
            found = LENGTH.search(self.head, 0, end)
            if found is None and self.head.startswith(b"HTTP/"):
                self.left = -1  # chunked
            else:
                self.left = int(found[1]) if found else 0
                data = self.head[end + 4 :]
        if self.left < 0:
            return data.endswith(b"0\r\n\r\n")
        self.left -= len(data)
        return self.left <= 0


class Engine(asyncio.Protocol):
    idle: list[Engine] = []  # noqa: RUF012  (one process, one pool)

    def __init__(self, client: Client) -> None:
        self.client: Client | None = client
        self.answer = Message()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        client = self.client
        if client is None:
            return
        client.transport.write(data)
        if self.answer.ends_with(data):
            self.client = client.engine = None
            self.answer = Message()
            Engine.idle.append(self)


class Client(asyncio.Protocol):
    def __init__(self, loop: asyncio.AbstractEventLoop, engine_port: int) -> None:
        self.loop, self.engine_port = loop, engine_port
        self.engine: Engine | None = None
        self.request, self.pieces = Message(), b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.pieces += data
        if not self.request.ends_with(data):
            return
        request, self.request, self.pieces = self.pieces, Message(), b""
        if Engine.idle:
            self.engine = Engine.idle.pop()
            self.engine.client = self
            self.engine.transport.write(request)
        else:
            self.task = self.loop.create_task(self.connect(request))

    async def connect(self, request: bytes) -> None:
        _, self.engine = await self.loop.create_connection(
            lambda: Engine(self), "127.0.0.1", self.engine_port
        )
        self.engine.transport.write(request)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.engine is not None:
            self.engine.client = None
            self.engine.transport.abort()


async def serve(port: int, engine_port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Client(loop, engine_port), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2])))
