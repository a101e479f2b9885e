"""A client of one connection: exact bytes out; what came back, piece by piece, with its moment.

Promise: nothing is repaired or hidden. An answer is complete only where its framing says so; what is
not HTTP is kept in `received` and named in `garbled`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import httptools


@dataclass(slots=True)
class Answer:
    """One response. `pieces`: (seconds on the monotonic clock, bytes) of its body as they were read."""

    status: int = 0
    headers: list[tuple[str, str]] = field(default_factory=list)
    trailers: list[tuple[str, str]] = field(default_factory=list)
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    complete: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    def header(self, name: str) -> str | None:
        return next((v for k, v in self.headers if k == name), None)

    @property
    def json(self) -> Any:
        """The body, or None where it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @property
    def error(self) -> dict[str, Any]:
        """The error object of OpenAI's shape; empty where there is none."""
        page = self.json
        error = page.get("error") if isinstance(page, dict) else None
        return error if isinstance(error, dict) else {}

    @property
    def events(self) -> list[bytes]:
        """The data of each whole event of the stream."""
        found = []
        for text in self.body.replace(b"\r\n", b"\n").split(b"\n\n")[:-1]:
            lines = [line[5:].removeprefix(b" ") for line in text.split(b"\n") if line.startswith(b"data:")]
            if lines:
                found.append(b"\n".join(lines))
        return found

    def __str__(self) -> str:
        return f"{self.status} {self.body[:100].decode('utf-8', 'replace')!r}"


class Client(asyncio.Protocol):
    """One connection to the gateway."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.answers: list[Answer] = []  # whole, or cut by the end of the connection
        self.interim: list[int] = []  # statuses from 100 to 199
        self.current = Answer()
        self.received = b""
        self.garbled: str | None = None
        self.closed = False
        self.reset = False
        self._parser = httptools.HttpResponseParser(self)
        self._heads_done = False
        self._began = False
        self._news = asyncio.Event()
        self._taken = 0

    @classmethod
    async def connect(cls, host: str, port: int, *, receive_buffer: int | None = None) -> Client:
        loop = asyncio.get_running_loop()
        if receive_buffer is None:
            _, client = await loop.create_connection(cls, host, port)
            return client
        family, *_, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
        raw = socket.socket(family, socket.SOCK_STREAM)
        raw.setblocking(False)
        # Before connecting: the window is agreed on then.
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await loop.sock_connect(raw, address)
        _, client = await loop.create_connection(cls, sock=raw)
        return client

    # --- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.received += data
        if self.garbled is None:
            try:
                self._parser.feed_data(data)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
                self.garbled = str(error)
        self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed, self.reset = True, exc is not None
        if self._began:
            headers = dict(self.current.headers)
            framed = "content-length" in headers or "transfer-encoding" in headers
            # A body framed by the end of the connection is whole if that end was orderly.
            self.current.complete = self._heads_done and not framed and exc is None
            self.answers.append(self.current)
            self._began = False
        self._news.set()

    # --- the parser

    def on_message_begin(self) -> None:
        self.current, self._heads_done, self._began = Answer(), False, True

    def on_header(self, name: bytes, value: bytes) -> None:
        into = self.current.trailers if self._heads_done else self.current.headers
        into.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        self._heads_done = True
        self.current.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self.current.pieces.append((time.monotonic(), data))

    def on_message_complete(self) -> None:
        self._began = False
        if self.current.status < 200:
            self.interim.append(self.current.status)
            return
        self.current.complete = True
        self.answers.append(self.current)

    # --- what cases call

    def send(self, data: bytes) -> None:
        self.transport.write(data)

    async def until(self, there: Callable[[], object], within: float) -> bool:
        """Wait until `there()`, or the end of the connection; whether it is so."""
        try:
            async with asyncio.timeout(within):
                while not there() and not self.closed:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            pass
        return bool(there())

    async def answer(self, within: float = 5.0) -> Answer:
        """The next answer, or what there is of one that was cut. Raises ConnectionError where none
        comes, TimeoutError where none is finished in `within` seconds."""
        if not await self.until(lambda: len(self.answers) > self._taken or self.garbled, within):
            if self.closed:
                raise ConnectionError("the gateway closed the connection without an answer")
            raise TimeoutError(f"no whole answer within {within:g} s")
        if len(self.answers) <= self._taken:
            raise ConnectionError(f"the answer is not HTTP: {self.garbled}")
        self._taken += 1
        return self.answers[self._taken - 1]

    async def head(self, within: float = 5.0) -> bool:
        """Whether the head of the answer under way has come in time."""
        return await self.until(lambda: self._heads_done and self.current.status >= 200, within)

    async def events(self, number: int, within: float = 5.0) -> bool:
        """Whether `number` events of the stream under way have come in time."""
        return await self.until(lambda: self.current.body.count(b"data:") >= number, within)

    def cut(self) -> None:
        """Vanish at once, without waiting for what is on its way."""
        if not self.closed:
            self.transport.abort()

    def close(self) -> None:
        self.transport.close()
