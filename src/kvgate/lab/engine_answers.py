"""How the scripted engine sends an answer: piece by piece, with pauses, with what is to go wrong.

Promises: it stops writing while its reader does not read; each answer is counted in the books until
the engine has let go of it, also when the cache overflows and every running stream dies.
"""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import struct
from collections import deque
from typing import Any

from kvgate.lab.books import Books, Record, Request
from kvgate.lab.script import ERROR_500, OVERFLOW, Script, answer_pieces, random_cuts

REASONS = {
    200: b"OK",
    400: b"Bad Request",
    404: b"Not Found",
    500: b"Internal Server Error",
    502: b"Bad Gateway",
}
SPLIT_PAUSE = 0.0005  # between random cuts: separate turns of the loop make separate TCP segments


class Answers(asyncio.Protocol):
    """The answering half of a connection. The other half reads requests and calls this one."""

    transport: asyncio.Transport

    def __init__(self, books: Books, loop: asyncio.AbstractEventLoop) -> None:
        self.books = books
        self.loop = loop
        self.waiting: deque[Request] = deque()
        self.answering = False
        self.generating = False
        self.script = Script()
        self.record: Record | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.gone = False
        self.paused = False
        self.blocked: tuple[deque[bytes], float, int, bool] | None = None  # a step that waits for its reader
        self.is_whole = False
        self.held = 0  # tokens of KV cache
        self.width = 1  # tokens of KV cache that a chunk takes

    def serve_next(self) -> None:
        """Take up the next request that waits."""
        raise NotImplementedError

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True
        self.close_record("client left")
        if not self.generating:
            return
        self.books.open -= 1
        if self.script.fault != "ignore_disconnect":
            self.let_go()
        elif self.blocked is not None:
            self.resume_writing()

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        if self.blocked is not None:
            step, self.blocked = self.blocked, None
            self.step(*step)

    def reply(self, status: int, body: bytes, *, close: bool = False, is_head: bool = False) -> None:
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%s\r\n"
        ending = b"connection: close\r\n" if close else b""
        shown = b"" if is_head else body
        self.transport.write(head % (status, REASONS.get(status, b"Error"), len(body), ending) + shown)
        self.finish(close)

    def finish(self, close: bool) -> None:
        self.close_record("whole")
        self.answering = False
        if close and not self.gone:
            self.transport.close()
        elif self.waiting:
            self.loop.call_soon(self.serve_next)
        elif self.script.close_idle_ms is not None:
            self.loop.call_later(self.script.close_idle_ms / 1000, self.close_if_idle)

    def close_if_idle(self) -> None:
        if not self.answering and not self.gone:
            self.transport.close()

    def close_record(self, how: str) -> None:
        record, self.record = self.record, None
        if record is not None:
            record.ended, record.how = self.loop.time(), how

    def exact(self, script: Script, close: bool) -> None:
        """The answer is spelt out in the script, head included."""
        self.script = script
        wire = deque(base64.b64decode(piece) for piece in script.wire or ())
        # Every piece is paused for, the head's too.
        self.later(
            script.first_delay_ms / 1000, wire, script.interval_ms / 1000, 0, close or script.connection_close
        )

    def generate(self, script: Script, body: Any, path: str, request: Request) -> None:
        fault = script.fault or ""
        script = script.capped(body)
        self.books.started()
        self.generating, self.script, self.is_whole = True, script, False
        self.width = body.get("n") or 1
        if not self.hold((script.prompt_tokens or 1) * self.width):
            return
        if fault == "hang_before_headers":
            return
        if fault == "close_before_headers":
            self.close_record("engine broke off")
            self.transport.close()
            return
        if fault == "reset_before_headers":
            self.close_record("engine broke off")
            self.reset()
            return
        if fault.isdigit():
            self.generated()
            self.reply(int(fault), ERROR_500, close=not request.keep_alive)
            return
        if script.wire is not None:
            self.exact(script, not request.keep_alive)
            return
        stream = body.get("stream") is True
        pieces = answer_pieces(script, body, path)
        framing = script.framing or ("chunked" if stream else "length")
        if framing == "chunked" and request.version == "1.0":
            framing = "close"
        close = script.connection_close or framing == "close" or not request.keep_alive
        kind = b"text/event-stream" if stream else b"application/json"
        head = [b"HTTP/1.1 200 OK", b"content-type: " + kind, b"x-engine: scripted"]
        head += [f"{name}: {value}".encode("latin-1") for name, value in script.headers]
        if framing == "chunked":
            head.append(b"transfer-encoding: chunked")
            if script.trailers:
                head.append(b"trailer: x-engine-trailer")
        elif framing == "length":
            head.append(b"content-length: %d" % sum(map(len, pieces)))
        if close:
            head.append(b"connection: close")
        wire = [b"%x\r\n%s\r\n" % (len(p), p) for p in pieces if p] if framing == "chunked" else pieces
        if framing == "chunked":
            wire.append(b"0\r\nx-engine-trailer: yes\r\n\r\n" if script.trailers else b"0\r\n\r\n")
        start = b"\r\n".join(head) + b"\r\n\r\n"
        first = script.first_delay_ms / 1000
        if stream or script.fault:
            self.later(first, deque([start, *wire]), script.interval_ms / 1000, -1, close)
        else:  # an answer in one piece comes when all of it has been generated
            delay = first + script.chunks * script.interval_ms / 1000
            self.later(delay, deque([start + b"".join(wire)]), 0.0, -1, close)

    def later(self, delay: float, wire: deque[bytes], pause: float, sent: int, close: bool) -> None:
        if delay:
            self.timer = self.loop.call_later(delay, self.step, wire, pause, sent, close)
        else:
            self.step(wire, pause, sent, close)

    def step(self, wire: deque[bytes], pause: float, sent: int, close: bool) -> None:
        """Send the next piece. `sent` counts body pieces; the head is piece -1."""
        seed = self.script.split
        if seed is not None and sent == -1:
            wire, pause, sent = deque(random_cuts(b"".join(wire), seed)), SPLIT_PAUSE, 0
        fault = self.script.fault or ""
        while wire:
            if "mid" in fault and sent >= self.script.fault_after:
                self.go_wrong(fault)
                return
            if self.paused and not self.gone:
                self.blocked = (wire, pause, sent, close)
                return
            piece = wire.popleft()
            if not self.gone:
                self.transport.write(piece)
                if self.record is not None:
                    self.record.sent_bytes += len(piece)
            sent += 1
            if self.books.cache.tokens and 0 < sent <= self.script.chunks and not self.hold(self.width):
                return
            # The head and the first piece go together.
            if pause and sent > 0 and wire:
                self.timer = self.loop.call_later(pause, self.step, wire, pause, sent, close)
                return
        self.generated()
        self.finish(close)

    def go_wrong(self, fault: str) -> None:
        if fault == "close_mid":
            self.close_record("engine broke off")
            self.transport.close()
        elif fault == "reset_mid_chunk":
            self.close_record("engine broke off")
            self.transport.write(b'ffff\r\ndata: {"half')
            self.loop.call_later(0.005, self.reset)  # after the bytes, which a reset would drop

    def reset(self) -> None:
        """Send RST instead of FIN: linger on, time 0. A dup, as uvloop lends no real socket."""
        if self.gone:
            return
        lent = self.transport.get_extra_info("socket")
        with socket.socket(fileno=os.dup(lent.fileno())) as own:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def hold(self, tokens: int) -> bool:
        """Take more of the KV cache. False where it has overflowed, and everybody has died of it."""
        self.held += tokens
        if self.books.cache.take(self, tokens):
            return True
        for victim in self.books.cache.holders():
            victim.overflowed()
        return False

    def overflowed(self) -> None:
        """The error in the stream, as llama.cpp ends every one of them when its cache is full."""
        if not self.gone:
            self.transport.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(OVERFLOW), OVERFLOW))
        self.generated()
        self.finish(close=True)

    def generated(self) -> None:
        """The answer is whole."""
        self.is_whole = True
        if self.generating and not self.gone:
            self.books.open -= 1
        self.let_go()

    def let_go(self) -> None:
        if self.generating:
            self.generating = False
            self.books.unfinished += not self.is_whole
            self.books.busy -= 1
            self.books.cache.give_back(self, self.held)
            self.held = 0
        self.blocked = None
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
