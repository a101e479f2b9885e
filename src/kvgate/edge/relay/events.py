"""An event stream as this client gets it.

Promises: what is written is always whole chunks, so that at any moment an error event and the end
of the stream can be added, whatever the engine had half sent; the content is the engine's, but for
the usage event that only the gate asked for; a chunk of whole lines is passed on as it came, at once.

The usual piece (one whole chunk that ends with a line, without the mark) is known by `is_usual` alone: a
comparison of three bytes, a look at the chunk header, one search; its bytes are neither copied nor framed
anew, and the parser does not see it. Several whole chunks in a piece are looked at by `piece`. Everything
else takes the slow way, 1 us: framing off, lines looked at (`wire.sse`), and what may go out gets one
chunk of its own. So an event is taken out of raw chunks by writing the piece that holds it anew. The slow
way runs for large or torn lines, and at the end of each stream.
"""

from __future__ import annotations

from kvgate.edge.relay.heads import Headers
from kvgate.edge.relay.reply import Reply
from kvgate.wire.chunks import LAST_CHUNK, ChunkReader, frame, is_whole
from kvgate.wire.sse import EventStream, Usage, error_event

_SIZES = 1024  # events are small


def _header_of_one_chunk(size: int) -> bytes:
    """The header with which a piece of `size` bytes is one whole chunk. Where there is none: more bytes
    than the piece has, with which it cannot begin."""
    for digits in range(1, 4):
        content = size - digits - 4
        if content > 0 and len(b"%x" % content) == digits:
            return b"%x\r\n" % content
    return b"\n" * (size + 1)


# Looked up, because to read the number takes twice as long.
_HEADERS = [_header_of_one_chunk(size) for size in range(_SIZES)]


def is_event_stream(status: int, headers: Headers) -> bool:
    """Whether an answer is an event stream whose events can be read (no `Content-Encoding`)."""
    found = False
    if status != 200:
        return False
    for name, value in headers:
        length = len(name)  # compared first, because it is cheaper
        if length == 12 and name.lower() == b"content-type":
            found = value[:17].lower() == b"text/event-stream"
        elif length == 16 and name.lower() == b"content-encoding" and value.strip().lower() != b"identity":
            return False
    return found


class EventReply(Reply):
    """Turns the pieces of one event stream into the bytes to write."""

    __slots__ = ("_events", "_frames", "_is_usual", "_mark", "_reader")

    def __init__(
        self,
        status: int,
        phrase: bytes,
        headers: Headers,
        framing: str,
        *,
        added: bytes,
        is_http11: bool,
        keep_alive: bool,
        events: EventStream,
    ) -> None:
        # A length would forbid to add an error or to take an event out.
        headers = [h for h in headers if h[0].lower() != b"content-length"]
        super().__init__(
            status,
            phrase,
            headers,
            "chunked" if framing == "chunked" else "close",
            added=added,
            is_http11=is_http11,
            keep_alive=keep_alive,
        )
        self._events = events
        self._mark = events.mark
        self._frames = is_http11
        self._reader = ChunkReader() if is_http11 and framing == "chunked" else None
        self._is_usual = False  # the next piece begins with a chunk and a line

    def is_usual(self, piece: bytes) -> bool:
        # With the header that its size has, and CRLF at its end, it is one chunk in any reading.
        size = len(piece)
        return (
            self._is_usual
            and size < _SIZES
            and piece.startswith(_HEADERS[size])
            and piece.endswith(b"\n\r\n")
            and self._says_nothing(piece)
        )

    def piece(self, piece: bytes) -> bytes:
        if self._is_usual and piece.endswith(b"\n\r\n") and is_whole(piece) and self._says_nothing(piece):
            return piece
        return self._slow_piece(piece)

    def _says_nothing(self, piece: bytes) -> bool:
        """Whether no usage stands in it."""
        # Searched from the end: that is where usage stands, and rfind is twice as fast as `in`.
        at = piece.rfind(self._mark)
        # SGLang writes `"usage":null` into each event.
        return at < 0 or (piece.startswith(b":null", at + 7) and piece.find(self._mark, 0, at) < 0)

    def _slow_piece(self, piece: bytes) -> bytes:
        reader, events = self._reader, self._events
        content = piece if reader is None else reader.feed(piece)
        lines = events.feed(content)
        self._is_usual = reader is not None and reader.is_between_chunks and events.is_at_line_end
        head, self._head = self._head, b""
        return head + self._framed(lines)

    def end(self) -> bytes:
        head, self._head = self._head, b""
        out = head + self._framed(self._events.end())
        if self._reader is not None:
            return out + self._reader.ending
        return out + LAST_CHUNK if self._frames else out

    def broken(self, error: bytes) -> bytes:
        head, self._head = self._head, b""
        is_whole_already = self._reader is not None and self._reader.ending
        event = self._events.end() if is_whole_already else self._events.break_off(error_event(error))
        return head + self._framed(event) + (LAST_CHUNK if self._frames else b"")

    @property
    def usage(self) -> Usage | None:
        return self._events.usage

    def _framed(self, content: bytes) -> bytes:
        return frame(content) if self._frames else content
