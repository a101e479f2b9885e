"""An HTTP/1.1 engine that does what each request tells it to: the far side of fault tests, of the
conformance suite and of benchmarks.

Promises: a request's script (see `Script`) decides the whole answer, byte for byte the same each
time; every generation is counted from its request until the engine has let go of it. It prices
nothing and clamps nothing: it generates as many chunks as its script says. It stops writing while
its reader does not read.

A script comes in the request's `x-script` header, or is planned beforehand: POST /script/plan with
`{"marker": script}`, for the requests that hold the text `kgc-marker` in their target or body.

    python -m kvgate.lab.scripted_engine --port 0     prints {"port": N}
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from typing import Any, cast

import httptools
import uvloop

from kvgate.lab import engine_pages
from kvgate.lab.books import Books, Cache, Request
from kvgate.lab.engine_answers import Answers
from kvgate.lab.engine_pages import COUNTING, Sizes
from kvgate.lab.script import CHAT, COMPLETIONS, ERROR_500, Script


class Connection(Answers):
    """One client connection: requests in, scripted answers out, in order."""

    def __init__(self, books: Books, sizes: Sizes, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(books, loop)
        self.sizes = sizes
        self.parser = httptools.HttpRequestParser(self)
        self.reading = Request()
        self.body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.books.connections += 1
        self.number = self.books.connections

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return  # the offer is not taken
        except httptools.HttpParserError:
            self.books.garbled += 1
            self.reply(400, b"bad request", close=True)

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
        if path.startswith("/script/"):
            self.serve_control(request, path, query)
            return
        books = self.books
        books.requests += 1
        books.recent.append(request.shown())
        generates = request.method == "POST" and path in (CHAT, COMPLETIONS)
        kind = "generation" if generates else "count" if path in COUNTING else "other"
        self.record = books.record(request, kind, self.number, self.loop.time())
        close = not request.keep_alive
        try:
            planned = books.plans[self.record.marker] if self.record is not None else b""
            script = Script.parse(request.header(b"x-script") or planned)
            body = json.loads(request.body) if generates or kind == "count" else {}
            if not isinstance(body, dict):
                raise TypeError("not an object")
            if generates:
                self.generate(script, body, path, request)
            elif kind == "count" and request.method == "POST":
                self.serve_count(script, body, path)
            elif script.wire is not None:
                self.exact(script, close)
            elif request.method in ("GET", "HEAD"):
                self.serve_page(request, path)
            elif request.method == "POST":
                self.reply(200, request.body, close=close)  # an echo
            else:
                self.reply(404, b'{"error":"no such page"}', close=close)
        except (ValueError, TypeError, AttributeError):
            self.reply(400, b'{"error":"bad script or body"}', close=close)

    def serve_control(self, request: Request, path: str, query: str) -> None:
        if path == "/script/plan":
            self.books.plan(request.body)
            page = b"{}"
        elif path == "/script/log":
            page = self.books.log_page(query.split(","))
        elif path == "/script/cache":  # let it overflow beyond so many tokens; 0: never
            self.books.cache.tokens = int(query or "0")
            page = b"{}"
        else:
            page = self.books.page()
            if "reset" in query:
                self.books.reset()
        self.reply(200, page, close=not request.keep_alive)

    def serve_page(self, request: Request, path: str) -> None:
        found = engine_pages.page(path, self.sizes)
        page = b'{"error":"no such page"}' if found is None else found
        status = 404 if found is None else 200
        self.reply(status, page, close=not request.keep_alive, is_head=request.method == "HEAD")

    def serve_count(self, script: Script, body: Any, path: str) -> None:
        self.books.counts += 1
        fault = script.count_fault or ""
        if fault == "hang":
            return
        if fault == "close":
            self.transport.close()
            return
        if fault == "400":
            self.reply(400, ERROR_500)
            return
        tokens = script.prompt_tokens or engine_pages.count(body, path)
        page = engine_pages.count_page(body, path, tokens, self.sizes)
        if fault == "bad_json":
            page = page[:-1]
        self.reply(500 if fault == "500" else 200, page)


async def serve(host: str, port: int, sizes: Sizes, *, overflows: bool) -> None:
    """Run until a signal. `overflows`: the KV cache has the sizes' end, instead of none."""
    loop = asyncio.get_running_loop()
    books = Books(cache=Cache(sizes.total_blocks * sizes.block_size if overflows else 0))
    server = await loop.create_server(lambda: Connection(books, sizes, loop), host, port, backlog=2048)
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
    parser.add_argument("--total-blocks", type=int, help="let the KV cache overflow beyond this")
    parser.add_argument("--block-size", type=int, default=1)
    parser.add_argument("--context", type=int, default=2048)
    given = parser.parse_args()
    sizes = Sizes(given.total_blocks or 4096, given.block_size, given.context)
    uvloop.run(serve(given.host, given.port, sizes, overflows=given.total_blocks is not None))


if __name__ == "__main__":
    main()
