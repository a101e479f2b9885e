"""The messages between server and application: a body read once and replayed, an answer watched.

Promises: the application sees the body whole, then whatever the server says, the disconnect among it,
even where we heard it first; messages of an answer are passed on as they are, at once, but for the
header fields of ours on the first; the end of an answer is noticed before it is passed on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Headers: TypeAlias = list[tuple[bytes, bytes]]

# Of an answer that is no stream the usage stands near its end.
TAIL_BYTES = 4096


class ClientGone(Exception):
    """The client has left before its request was whole. There is nobody to answer."""


class BodyTooLarge(Exception):
    """The body is longer than is allowed."""


async def read_body(receive: Receive, headers: Headers, limit: int) -> bytes:
    """The whole body, of at most `limit` bytes. Raises `ClientGone` or `BodyTooLarge`."""
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise BodyTooLarge
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise BodyTooLarge
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


class Replay:
    """The application's side of what the client sends."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._body: bytes | None = None
        self.is_gone = False

    def give(self, body: bytes) -> None:
        """What the application gets first."""
        self._body = body

    async def gone(self) -> None:
        """Returns when the client has left."""
        while not self.is_gone:
            await self._hear()

    async def receive(self) -> Message:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        if self.is_gone:
            # Some servers say it once, and it was said to us.
            return {"type": "http.disconnect"}
        return await self._hear()

    async def _hear(self) -> Message:
        message = await self._receive()
        self.is_gone = self.is_gone or message["type"] == "http.disconnect"
        return message


class Watched:
    """The application's answer on its way to the server."""

    def __init__(self, send: Send, added: Headers, finished: Callable[[], None]) -> None:
        self._send = send
        self._added = added
        self._finished = finished
        self._tail = b""
        self.status = 0

    @property
    def tail(self) -> bytes:
        """The end of the last piece that was not empty."""
        return self._tail[-TAIL_BYTES:]

    async def send(self, message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.body":
            self._tail = message.get("body") or self._tail
            if not message.get("more_body", False):
                self._finished()
        elif kind == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *self._added]}
        elif kind == "http.response.pathsend":
            self._finished()
        await self._send(message)


def with_body(scope: Any, body: bytes, drop: frozenset[bytes]) -> dict[str, Any]:
    """The scope for an application that gets `body`: its length is right, and told once."""
    out = drop | {b"content-length", b"transfer-encoding"}
    headers = [field for field in scope["headers"] if field[0].lower() not in out]
    headers.append((b"content-length", b"%d" % len(body)))
    return {**scope, "headers": headers}


async def respond(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """A whole answer of ours."""
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body, "more_body": False})
