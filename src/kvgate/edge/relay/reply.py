"""The engine's answer as this client gets it: head, framing, end.

A chunked or sized answer is passed on byte for byte. Only two cases need new framing: an answer
that ends with its connection, for an HTTP/1.1 client (chunked here, so that the client's
connection lives on), and a chunked one for an HTTP/1.0 client (its content alone). Event streams
have their own file, `events.py`.
"""

from __future__ import annotations

from kvgate.edge.relay.heads import Headers, response_head
from kvgate.wire.chunks import LAST_CHUNK, frame
from kvgate.wire.sse import TAIL_BYTES, Usage, usage_at_end


class Reply:
    """Turns the pieces of one answer into the bytes to write."""

    __slots__ = ("_chunks", "_head", "_tail", "is_cut_visible", "status")

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
        reads_usage: bool = False,
    ) -> None:
        self.status = status
        self._chunks = framing == "close" and is_http11
        # Whether a client can tell a broken answer from a whole one by its framing alone.
        self.is_cut_visible = is_http11 or framing == "length"
        lines = b"transfer-encoding: chunked\r\n" if is_http11 and framing != "length" else b""
        if not keep_alive:
            lines += b"connection: close\r\n"
        self._head = response_head(status, phrase, headers, lines, added)
        # The last bytes of an answer whose usage is wanted. Where it is chunked in small pieces the
        # framing may lie within the usage; then it is not known.
        self._tail: bytes | None = b"" if reads_usage else None

    def is_usual(self, piece: bytes) -> bool:
        """Whether a piece is one whole chunk in the middle of an event stream, of whole lines that are
        passed on as they are: `piece` would give it back unchanged, and nothing would be learned."""
        return False

    def piece(self, piece: bytes) -> bytes:
        """The bytes to write for a piece of the answer; the head comes with the first."""
        if self._tail is not None:
            end = piece[-TAIL_BYTES:]
            self._tail = (self._tail + end)[-TAIL_BYTES:] if self._tail else end
        if self._chunks and piece:
            piece = frame(piece)
        if self._head:
            piece = self._head + piece
            self._head = b""
        return piece

    def skip_head(self) -> None:
        """The client has had a head."""
        self._head = b""

    def end(self) -> bytes:
        """The bytes to write when the answer is whole."""
        head, self._head = self._head, b""
        return head + LAST_CHUNK if self._chunks else head

    def broken(self, error: bytes) -> bytes | None:
        """The bytes that end an answer which cannot go on, with `error` (JSON) in it; None where
        its form has no place for an error and it must be cut."""
        return None

    @property
    def usage(self) -> Usage | None:
        """The tokens that the engine has reported; None where it has not (yet)."""
        return usage_at_end(self._tail) if self._tail else None
