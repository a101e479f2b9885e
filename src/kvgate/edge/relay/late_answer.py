"""The engine's answer where the client has had a head of ours already (`comments`).

Promises: of an event stream every event is passed on as it would have been, only the engine's head is
not; an answer that is no event stream, such as the engine's error, becomes one error event.
"""

from __future__ import annotations

import json
from typing import Any

from kvgate.edge.relay.answer import Answer
from kvgate.edge.relay.events import is_event_stream
from kvgate.edge.relay.heads import Headers
from kvgate.edge.relay.reply import Reply
from kvgate.wire.chunks import LAST_CHUNK, frame
from kvgate.wire.refusal import Dialect, stream_error
from kvgate.wire.sse import error_event

# Errors are short; of a longer answer the beginning is told.
ERROR_BYTES_MAX = 64 * 1024
MESSAGE_MAX = 2000
NO_STREAM = "The engine answered with status %d, and not with the event stream that was asked for."


class LateAnswer(Answer):
    """An answer without its head. `dialect`: whose error shape the client reads; set by the owner."""

    __slots__ = ("dialect",)

    dialect: Dialect

    def head(self, status: int, phrase: bytes, headers: Headers, framing: str) -> Answer | None:
        if is_event_stream(status, headers):
            raw = super().head(status, phrase, headers, framing)
            self._reply.skip_head()
            return raw
        self._exchange.answer_begins()
        self._reply = ErrorReply(status, self.dialect)
        return None


class ErrorReply(Reply):
    """Collects an answer that is no event stream, and tells it as one event."""

    __slots__ = ("_body", "_dialect")

    def __init__(self, status: int, dialect: Dialect) -> None:
        super().__init__(status, b"", [], "chunked", added=b"", is_http11=True, keep_alive=True)
        self._dialect = dialect
        self._body = b""

    def piece(self, piece: bytes) -> bytes:
        self._body = (self._body + piece)[:ERROR_BYTES_MAX]
        return b""

    def end(self) -> bytes:
        return frame(event_of(self.status, self._body, self._dialect)) + LAST_CHUNK

    def broken(self, error: bytes) -> bytes | None:
        return frame(error_event(error)) + LAST_CHUNK


def event_of(status: int, body: bytes, dialect: Dialect) -> bytes:
    """The engine's own error object where it has one, else its words in an error of ours."""
    try:
        told: Any = json.loads(body)
    except (ValueError, RecursionError):
        told = None
    if status >= 400 and isinstance(told, dict):
        if told.get("error"):
            name = b"event: error\n" if dialect is Dialect.ANTHROPIC else b""
            return name + error_event(json.dumps(told, ensure_ascii=False).encode("utf-8", "replace"))
        words = told.get("message") or told.get("detail")
    else:
        words = body.decode("utf-8", "replace").strip() if status >= 400 else None
    message = words if isinstance(words, str) and words else NO_STREAM % status
    return stream_error(message[:MESSAGE_MAX], "engine_error", dialect=dialect)
