"""An HTTP/1.1 engine that does what each request tells it to: the far side of fault tests and benchmarks.

Promises: a request's `x-script` header (JSON, see `Script`) decides the whole answer, byte for byte
the same each time; every generation is counted from its request until the engine has let go of it.
It prices nothing and clamps nothing: it generates as many chunks as its script says.

    python -m kvgate.lab.scripted_engine --port 0     prints {"port": N}
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import struct
from collections import deque
from typing import Any, cast

import httptools
import uvloop

from kvgate.lab.script import (
    CHAT,
    COMPLETIONS,
    COUNTING,
    ERROR_500,
    Books,
    Request,
    Script,
    answer_pieces,
    count,
    random_cuts,
)

REASONS = {
    200: b"OK",
    400: b"Bad Request",
    404: b"Not Found",
    500: b"Internal Server Error",
    502: b"Bad Gateway",
}
SPLIT_PAUSE = 0.0005  # between random cuts: separate turns of the loop make separate TCP segments


class Connection(asyncio.Protocol):
    """One client connection: requests in, scripted answers out, in order."""

    transport: asyncio.Transport

    def __init__(self, books: Books, loop: asyncio.AbstractEventLoop) -> None:
        self.books = books
        self.loop = loop
        self.parser = httptools.HttpRequestParser(self)
        self.waiting: deque[Request] = deque()
        self.reading = Request()
        self.body: list[bytes] = []
        self.answering = False
        self.generating = False
        self.script = Script()
        self.timer: asyncio.TimerHandle | None = None
        self.gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.books.connections += 1

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.reply(400, b"bad request", close=True)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True
        if not self.generating:
            return
        self.books.open -= 1
        if self.script.fault != "ignore_disconnect":
            self.let_go()

    # Callbacks of the parser.
    def on_message_begin(self) -> None:
        self.reading, self.body = Request(), []

    def on_url(self, url: bytes) -> None:
        self.reading.path += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.reading.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.reading.method = self.parser.get_method().decode()
        self.reading.version = self.parser.get_http_version()
        self.reading.keep_alive = self.parser.should_keep_alive()
        if self.reading.header(b"expect").lower() == b"100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self.body.append(data)

    def on_message_complete(self) -> None:
        self.reading.body = b"".join(self.body)
        self.waiting.append(self.reading)
        self.serve_next()

    def serve_next(self) -> None:
        while self.waiting and not self.answering and not self.gone:
            self.answering = True
            self.serve(self.waiting.popleft())

    def serve(self, request: Request) -> None:
        path, _, query = request.path.partition("?")
        if path == "/script/stats":
            page = self.books.page()
            if "reset" in query:  # what runs now still counts
                self.books.recent.clear()
                self.books.requests = self.books.generations = self.books.counts = 0
                self.books.max_concurrent = self.books.busy
            self.reply(200, page, close=not request.keep_alive)
            return
        self.books.requests += 1
        heads = [(k.decode("latin-1").lower(), v.decode("latin-1")) for k, v in request.headers]
        self.books.recent.append(
            {"method": request.method, "path": request.path, "headers": heads, "body": request.body}
        )
        if request.method == "GET" and path in ("/health", "/v1/models"):
            models = {"object": "list", "data": [{"id": "scripted", "object": "model"}]}
            page = b'{"status":"ok"}' if path == "/health" else json.dumps(models).encode()
            self.reply(200, page, close=not request.keep_alive)
            return
        if request.method != "POST":
            self.reply(404, b'{"error":"no such page"}', close=not request.keep_alive)
            return
        try:
            script = Script.parse(request.header(b"x-script"))
            body = json.loads(request.body) if path in (CHAT, COMPLETIONS, *COUNTING) else {}
        except (ValueError, TypeError, AttributeError):
            self.reply(400, b'{"error":"bad script or body"}', close=not request.keep_alive)
            return
        if path in COUNTING:
            self.serve_count(script, body, path)
            return
        if path in (CHAT, COMPLETIONS):
            self.generate(script, body, path, request)
            return
        self.reply(200, request.body, close=not request.keep_alive)  # any other POST: an echo
        return

    def serve_count(self, script: Script, body: Any, path: str) -> None:
        self.books.counts += 1
        if script.count_fault == "hang":
            return
        if script.count_fault == "close":
            self.transport.close()
            return
        n = script.prompt_tokens or count(body, path)
        page = (
            b'{"tokens":%s}' % str(list(range(n))).encode()
            if path == "/tokenize"
            else b'{"input_tokens":%d}' % n
        )
        if script.count_fault == "bad_json":
            page = page[:-1]
        self.reply(500 if script.count_fault == "500" else 200, page)

    def reply(self, status: int, body: bytes, *, close: bool = False) -> None:
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%s\r\n"
        ending = b"connection: close\r\n" if close else b""
        self.transport.write(head % (status, REASONS.get(status, b"Error"), len(body), ending) + body)
        self.finish(close)

    def finish(self, close: bool) -> None:
        self.answering = False
        if close and not self.gone:
            self.transport.close()
        elif self.waiting:
            self.loop.call_soon(self.serve_next)

    def generate(self, script: Script, body: Any, path: str, request: Request) -> None:
        self.books.started()
        self.generating, self.script = True, script
        if script.fault == "hang_before_headers":
            return
        if script.fault == "close_before_headers":
            self.transport.close()
            return
        if (script.fault or "").isdigit():
            self.generated()
            self.reply(int(script.fault or 500), ERROR_500, close=not request.keep_alive)
            return
        stream = body.get("stream") is True
        pieces = answer_pieces(script, body, path)
        framing = script.framing or ("chunked" if stream else "length")
        if framing == "chunked" and request.version == "1.0":
            framing = "close"
        close = script.connection_close or framing == "close" or not request.keep_alive
        kind = b"text/event-stream" if stream else b"application/json"
        head = [b"HTTP/1.1 200 OK", b"content-type: " + kind, b"x-engine: scripted"]
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
        if stream or script.fault:
            self.step(deque([start, *wire]), script.interval_ms / 1000, -1, close)
        else:  # an answer in one piece comes when all of it has been generated
            delay = script.chunks * script.interval_ms / 1000
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
            piece = wire.popleft()
            if not self.gone:
                self.transport.write(piece)
            sent += 1
            # The head and the first piece go together.
            if pause and sent > 0 and wire:
                self.timer = self.loop.call_later(pause, self.step, wire, pause, sent, close)
                return
        self.generated()
        self.finish(close)

    def go_wrong(self, fault: str) -> None:
        if fault == "close_mid":
            self.transport.close()
        elif fault == "reset_mid_chunk":
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

    def generated(self) -> None:
        """The answer is whole."""
        if self.generating and not self.gone:
            self.books.open -= 1
        self.let_go()

    def let_go(self) -> None:
        if self.generating:
            self.generating = False
            self.books.busy -= 1
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


async def serve(host: str, port: int) -> None:
    loop = asyncio.get_running_loop()
    books = Books()
    server = await loop.create_server(lambda: Connection(books, loop), host, port, backlog=2048)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
    server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.host, arguments.port))


if __name__ == "__main__":
    main()
