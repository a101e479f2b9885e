"""The client of the benchmark: raw requests on kept-alive connections, and what comes back counted.

Promise: an answer that is not 200, or a connection that ends early, is an error of the run
(`Broken`), never a fast request.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any, cast

LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.I)
BODY_BYTES = 2048
TOKENS = 16  # output cap of a request that is answered in one piece


class Broken(Exception):
    """The gateway did not answer as a working one does; the message shows what came."""


def post(path: str, body: dict[str, Any]) -> bytes:
    """A request whose body is exactly BODY_BYTES long."""
    room = BODY_BYTES - len(json.dumps(body))
    if "messages" in body:
        body["messages"][0]["content"] = "word " * (room // 5) + "x" * (room % 5)
    else:  # token ids of 4 characters, each with a comma and a space
        body["prompt"] = [1000 + i % 9000 for i in range(room // 6)]
    data = json.dumps(body).encode().ljust(BODY_BYTES)
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer bench\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def request(*, token_ids: bool, stream: bool, tokens: int = TOKENS) -> bytes:
    """A chat request, or a completion of token ids."""
    body: dict[str, Any] = {"model": "bench", "max_tokens": tokens, "stream": stream}
    if token_ids:
        return post("/v1/completions", body | {"prompt": []})
    return post("/v1/chat/completions", body | {"messages": [{"role": "user", "content": ""}]})


def is_whole(data: bytes) -> bool:
    """Whether one answer has arrived. Raises `Broken` for one that is not 200."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return False
    if not data.startswith(b"HTTP/1.1 200"):
        raise Broken(f"answered {data[:300]!r}")
    found = LENGTH.search(data, 0, end)
    if found:
        return len(data) >= end + 4 + int(found[1])
    return data.endswith(b"0\r\n\r\n")


class Tally:
    """What all connections of one measurement share."""

    def __init__(self) -> None:
        self.sent = 0
        self.answers = 0
        self.events = 0
        self.first_bytes: list[float] = []  # seconds
        self.is_over = False
        self.failure: Exception | None = None

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure


class Connection(asyncio.Protocol):
    """Sends one request when connected; subclasses say what happens with the answer."""

    def __init__(self, tally: Tally, request: bytes) -> None:
        self.tally, self.request = tally, request
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.send()

    def send(self) -> None:
        self.received = b""
        self.tally.sent += 1
        self.transport.write(self.request)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.tally.is_over and self.tally.failure is None:
            self.tally.failure = Broken(f"the gateway closed a connection: {exc}, {self.received[-200:]!r}")

    def arrived(self, data: bytes) -> bool:
        """Whether the answer is whole now."""
        self.received += data
        try:
            return is_whole(self.received)
        except Broken as failure:
            self.tally.failure = failure
            return False


class Caller(Connection):
    """Closed loop: the next request as soon as the last one is answered."""

    def data_received(self, data: bytes) -> None:
        if self.arrived(data):
            self.tally.answers += 1
            if not self.tally.is_over:
                self.send()


class PacedCaller(Connection):
    """Sends when it is told to, which it may be while it `is_free`."""

    is_free = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def send(self) -> None:
        self.is_free = False
        super().send()

    def data_received(self, data: bytes) -> None:
        if self.arrived(data):
            self.tally.answers += 1
            self.is_free = True


class Listener(Connection):
    """Reads one long stream and counts its events."""

    events = 0
    has_begun = False

    def data_received(self, data: bytes) -> None:
        if not self.has_begun and not data.startswith(b"HTTP/1.1 200"):
            self.tally.failure = Broken(f"answered {data[:300]!r}")
        self.has_begun = True
        seen = data.count(b"data: ")
        self.events += seen
        self.tally.events += seen


class Prober(Connection):
    """One short stream after the other; notes how long each took to its first event."""

    def send(self) -> None:
        self.is_waiting = True
        self.sent_at = time.perf_counter()
        super().send()

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        is_whole = self.arrived(data)
        if self.is_waiting and b"data: " in self.received:
            self.is_waiting = False
            self.tally.first_bytes.append(now - self.sent_at)
        if is_whole:
            self.tally.answers += 1
            if not self.tally.is_over:
                self.send()
