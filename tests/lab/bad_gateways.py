"""Gateways that are wrong on purpose, each in one way: the suite must say so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Proxy:
    """Passes bytes between a client and the engine, connection for connection, and gets some wrong.

    `flaw`: None; `buffers` (the answer is passed on when it is whole); `keeps` (the engine's
    connection stays open when the client leaves); `hides cuts` (a broken answer gets a proper end);
    `merges` (looks at lengths only, so that a request hidden behind chunks is passed on).
    """

    def __init__(self, engine_port: int, flaw: str | None) -> None:
        self.engine_port = engine_port
        self.flaw = flaw
        self.writers: list[asyncio.StreamWriter] = []
        self.tasks: set[asyncio.Task[None]] = set()

    def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self.serve(reader, writer))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.engine_port)
        self.writers += [writer, up_writer]
        answers = asyncio.create_task(self.answers(up_reader, writer))
        try:
            with suppress(ConnectionError):
                while data := await reader.read(65536):
                    if self.flaw == "merges":
                        data = data.replace(b"Content-Length:", b"X-Length:")
                    up_writer.write(data)
        finally:
            if self.flaw != "keeps":
                answers.cancel()
                up_writer.close()
                writer.close()

    async def answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held = b""
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                if self.flaw != "buffers":
                    writer.write(data)
                    continue
                held += data
                if held.endswith(b"0\r\n\r\n"):
                    writer.write(held)
                    held = b""
        writer.write(held)
        if self.flaw == "hides cuts":
            writer.write(b"0\r\n\r\n")
        writer.close()


@asynccontextmanager
async def bad_gateway(engine_port: int, flaw: str | None) -> AsyncIterator[str]:
    """Its URL."""
    proxy = Proxy(engine_port, flaw)
    server = await asyncio.start_server(proxy.connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in proxy.tasks:
            task.cancel()
        await asyncio.gather(*proxy.tasks, return_exceptions=True)
        for writer in proxy.writers:
            writer.transport.abort()
            with suppress(ConnectionError):
                await writer.wait_closed()
