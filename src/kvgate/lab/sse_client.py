"""The smallest HTTP/1.1 client that can follow an event stream: one request, one connection.

Promises: `event` is called with the data of each server-sent event as it arrives; the body of an
answer that is not a 200 is kept whole; an answer that stops before its end raises `Cut`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

READ_BYTES = 65536


class Cut(Exception):
    """The connection ended before the answer did."""


@dataclass(slots=True)
class Answer:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)  # names in lower case
    body: bytes = b""


async def post(
    url: str, body: bytes, event: Callable[[bytes], None], headers: Mapping[str, str] | None = None
) -> Answer:
    """POST `body`, with more `headers`; return when the answer is complete."""
    parts = urlsplit(url)
    is_secured = parts.scheme == "https"
    port = parts.port or (443 if is_secured else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=is_secured or None)
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    try:
        head = (
            f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
            f"Accept: text/event-stream\r\nContent-Length: {len(body)}\r\n{more}\r\n"
        )
        writer.write(head.encode("ascii") + body)
        await writer.drain()
        receiver = _Receiver(event)
        parser = httptools.HttpResponseParser(receiver)
        receiver.status = parser.get_status_code
        while not receiver.complete:
            data = await reader.read(READ_BYTES)
            if not data:
                raise Cut("the connection was closed before the end of the answer")
            try:
                parser.feed_data(data)
            except httptools.HttpParserError as error:
                raise Cut(f"not HTTP: {error}") from None
        answer = receiver.answer
        answer.status = parser.get_status_code()
        return answer
    finally:
        writer.close()


class _Receiver:
    """The callbacks of the parser."""

    def __init__(self, event: Callable[[bytes], None]) -> None:
        self.answer = Answer()
        self.complete = False
        self.status: Callable[[], int] = int
        self._event = event
        self._rest = b""

    def on_header(self, name: bytes, value: bytes) -> None:
        self.answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip()

    def on_body(self, data: bytes) -> None:
        if self.status() != 200:
            self.answer.body += data
            return
        # An event ends with an empty line; what follows the last one has not arrived whole.
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for text in events:
            lines = [line[5:].removeprefix(b" ") for line in text.split(b"\n") if line.startswith(b"data:")]
            if lines:
                self._event(b"\n".join(lines))

    def on_message_complete(self) -> None:
        self.complete = True
