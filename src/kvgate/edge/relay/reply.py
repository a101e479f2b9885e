"""The engine's answer as this client gets it: head, framing, end.

A chunked or sized answer is passed on byte for byte. Only two cases need new framing: an answer
that ends with its connection, for an HTTP/1.1 client (chunked here, so that the client's
connection lives on), and a chunked one for an HTTP/1.0 client (its content alone).
"""

from __future__ import annotations

from kvgate.edge.relay.heads import Headers, response_head


class Reply:
    """Turns the pieces of one answer into the bytes to write."""

    __slots__ = ("_chunks", "_head", "is_cut_visible", "status")

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
    ) -> None:
        self.status = status
        self._chunks = framing == "close" and is_http11
        # Whether a client can tell a broken answer from a whole one by its framing alone.
        self.is_cut_visible = is_http11 or framing == "length"
        lines = b"transfer-encoding: chunked\r\n" if is_http11 and framing != "length" else b""
        if not keep_alive:
            lines += b"connection: close\r\n"
        self._head = response_head(status, phrase, headers, lines, added)

    def piece(self, piece: bytes) -> bytes:
        """The bytes to write for a piece of the answer; the head comes with the first."""
        if self._chunks and piece:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        if self._head:
            piece = self._head + piece
            self._head = b""
        return piece

    def end(self) -> bytes:
        """The bytes to write when the answer is whole."""
        head, self._head = self._head, b""
        return head + b"0\r\n\r\n" if self._chunks else head
