"""Chunked framing that has been checked by llhttp already: where chunks end, and what is in them.

Promises nothing about framing that is not valid; the relay shows bytes to llhttp first.
"""

from __future__ import annotations

LAST_CHUNK = b"0\r\n\r\n"


def frame(content: bytes) -> bytes:
    """One chunk; nothing for no content, because an empty chunk would be the end."""
    return b"%x\r\n%b\r\n" % (len(content), content) if content else b""


def is_whole(raw: bytes) -> bool:
    """Whether `raw`, which begins with a chunk, is nothing but whole chunks before the last one."""
    at, end = 0, len(raw)
    while at < end:
        header_end = raw.find(b"\r\n", at)
        if header_end < 0:
            return False
        try:
            size = int(raw[at:header_end], 16)
        except ValueError:
            return False  # an extension: for the reader
        if size < 1:
            return False
        at = header_end + size + 4
    return at == end


class ChunkReader:
    """Takes the framing off, wherever the pieces are cut. `ending` is the last chunk, with trailers."""

    __slots__ = ("_header", "_left", "_skip", "ending")

    def __init__(self) -> None:
        self._header = b""  # the begun header line
        self._left = 0  # bytes that are missing of the current chunk
        self._skip = 0  # bytes of line end behind a chunk that are missing
        self.ending = b""

    @property
    def is_between_chunks(self) -> bool:
        return not (self._left or self._skip or self._header or self.ending)

    def feed(self, raw: bytes) -> bytes:
        """The content in the next piece."""
        content = []
        at, end = 0, len(raw)
        while at < end:
            if self.ending:
                self.ending += raw[at:]
                break
            if self._left:
                piece = raw[at : at + self._left]
                content.append(piece)
                at += len(piece)
                self._left -= len(piece)
                continue
            if self._skip:
                step = min(self._skip, end - at)
                self._skip -= step
                at += step
                continue
            line_end = raw.find(b"\n", at) + 1
            if not line_end:
                self._header += raw[at:]
                break
            header = self._header + raw[at:line_end]
            self._header = b""
            at = line_end
            self._left = int(header.partition(b";")[0], 16)
            self._skip = 2
            if not self._left:
                self._skip = 0
                self.ending = header
        return b"".join(content)
