"""The real gateway process before the scripted engine, and raw HTTP/1.1 clients.

Promises: processes are the ones users run, stopped by pid; clients send exact bytes and show exactly
what came back, frame by frame; `Stack.assert_idle` is the end check of every fault test.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from typing import Any, cast

import httptools

START_TIMEOUT = 20.0
IDLE_TIMEOUT = 3.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
READY = re.compile(
    r"^kvgate listening on http://127\.0\.0\.1:(\d+), admin on http://127\.0\.0\.1:(\d+), engine "
)


@dataclass(slots=True)
class Response:
    """One HTTP response as it arrived. `complete` is False where the connection ended first."""

    status: int = 0
    headers: list[tuple[str, str]] = field(default_factory=list)
    trailers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    complete: bool = False

    def header(self, name: str) -> str | None:
        return next((v for k, v in self.headers if k == name), None)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The refusal's reason."""
        return str(self.json["error"]["code"])


class Client(asyncio.Protocol):
    """One connection: exact bytes out, responses in, in order."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.responses: asyncio.Queue[Response] = asyncio.Queue()
        self.current = Response()
        self.heads_done = False
        self.began = False
        self.received = b""
        self.closed = asyncio.Event()
        self.news = asyncio.Event()

    @classmethod
    async def connect(cls, port: int) -> Client:
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(cls, "127.0.0.1", port)
        return client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.parser.feed_data(data)
        self.news.set()

    def eof_received(self) -> None:
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        if self.began:
            headers = dict(self.current.headers)
            framed = "content-length" in headers or "chunked" in headers.get("transfer-encoding", "")
            # A body framed by the end of the connection is whole if that end was orderly.
            self.current.complete = self.heads_done and not framed and exc is None
            self.responses.put_nowait(self.current)
            self.began = False
        self.closed.set()
        self.news.set()

    def on_message_begin(self) -> None:
        self.current, self.heads_done, self.began = Response(), False, True

    def on_header(self, name: bytes, value: bytes) -> None:
        into = self.current.trailers if self.heads_done else self.current.headers
        into.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        self.heads_done = True
        self.current.status = self.parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self.current.body += data

    def on_message_complete(self) -> None:
        self.current.complete = True
        self.began = False
        self.responses.put_nowait(self.current)

    def send(self, data: bytes) -> None:
        self.transport.write(data)

    async def response(self, within: float = 10.0) -> Response:
        """The next response; the rest of one that was cut; or ConnectionError if none will come."""
        async with asyncio.timeout(within):
            while self.responses.empty():
                if self.closed.is_set():
                    raise ConnectionError("closed without a response")
                self.news.clear()
                await self.news.wait()
        return self.responses.get_nowait()

    async def events(self, number: int, within: float = 10.0) -> None:
        """Wait until `number` events of the stream have arrived (0: its headers), or it has ended."""
        async with asyncio.timeout(within):
            while not self.closed.is_set() and self.responses.empty():
                if self.heads_done and self.current.body.count(b"data: ") >= number:
                    return
                self.news.clear()
                await self.news.wait()

    def cut(self) -> None:
        """Vanish at once, without waiting for what is on its way."""
        if not self.closed.is_set():
            self.transport.abort()

    async def close(self) -> None:
        self.transport.close()
        await self.closed.wait()


def payload(stream: Any = True, **fields: Any) -> dict[str, Any]:
    """A small chat body. A field set to None is sent as null; `...` leaves it out."""
    body = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 16}
    body |= {"stream": stream} | fields
    return {name: value for name, value in body.items() if value is not ...}


def request(
    path: str = CHAT,
    body: Any = None,
    script: dict[str, Any] | None = None,
    *,
    method: str = "POST",
    headers: str = "",
    version: str = "1.1",
) -> bytes:
    """One request, as bytes. `body`: JSON value or bytes; `headers`: extra lines, each with CRLF."""
    data = body if isinstance(body, bytes) else json.dumps(payload() if body is None else body).encode()
    if method == "GET":
        data = b""
    head = f"{method} {path} HTTP/{version}\r\nHost: kvgate.test\r\n"
    if method != "GET":
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    if script is not None:
        head += f"x-script: {json.dumps(script)}\r\n"
    return (head + headers + "\r\n").encode() + data


async def fetch(port: int, data: bytes, within: float = 10.0) -> Response:
    """One request on a connection of its own."""
    client = await Client.connect(port)
    try:
        client.send(data)
        return await client.response(within)
    finally:
        await client.close()


def get_json(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return json.loads(answer.read())


class Process:
    """A child that says in its first line where it listens."""

    def __init__(self, *arguments: str) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVGATE_")}
        self.child = subprocess.Popen(
            [sys.executable, "-m", *arguments], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.child.stdout is not None
        readable, _, _ = select.select([self.child.stdout], [], [], START_TIMEOUT)
        self.first_line = self.child.stdout.readline() if readable else ""
        if not self.first_line:
            self.kill()
            raise RuntimeError(f"{arguments[0]} did not start: status {self.child.poll()}")

    @property
    def pid(self) -> int:
        return self.child.pid

    def stop(self, within: float = 10.0) -> int:
        """SIGTERM, then wait. Returns the exit status."""
        if self.child.poll() is None:
            os.kill(self.pid, signal.SIGTERM)
        try:
            return self.child.wait(within)
        finally:
            self.kill()

    def kill(self) -> None:
        if self.child.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.child.wait()
        if self.child.stdout is not None:
            self.child.stdout.close()


class Engine(Process):
    def __init__(self, port: int = 0) -> None:
        super().__init__("kvgate.lab.scripted_engine", "--port", str(port))
        self.port: int = json.loads(self.first_line)["port"]

    def stats(self, *, reset: bool = False) -> Any:
        return get_json(self.port, "/script/stats" + ("?reset=1" if reset else ""))

    def generations_seen(self, path: str = CHAT) -> list[dict[str, Any]]:
        """The requests for a generation that arrived, oldest first."""
        return [r for r in self.stats()["recent"] if r["path"].split("?")[0] == path]


class Gateway(Process):
    def __init__(self, *arguments: str) -> None:
        super().__init__("kvgate", "serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", *arguments)
        ready = READY.match(self.first_line)
        if ready is None:
            self.kill()
            raise RuntimeError(f"not the ready line: {self.first_line!r}")
        self.port, self.admin_port = int(ready[1]), int(ready[2])


class Stack:
    """A scripted engine and a gateway before it."""

    def __init__(self, *options: str, total_blocks: int = 4096, context: int | None = None) -> None:
        self.engine = Engine()
        self.context = context or total_blocks
        arguments = {
            "--upstream": f"http://127.0.0.1:{self.engine.port}",
            "--engine": "llamacpp",
            "--total-blocks": str(total_blocks),
            "--block-size": "1",
            "--context": str(self.context),
            "--engine-idle-timeout": "2",
            "--client-idle-timeout": "2",
            "--abort-grace": "0.2",
            "--max-wait": "0",  # who does not fit is told so at once, so that tests need not wait
        }
        for name, value in zip(options[::2], options[1::2], strict=True):
            arguments[name] = value
        try:
            self.gateway = Gateway(*(word for pair in arguments.items() for word in pair))
        except BaseException:
            self.engine.kill()
            raise

    @property
    def port(self) -> int:
        return self.gateway.port

    def stop(self) -> None:
        self.gateway.kill()
        self.engine.kill()

    def status(self) -> Any:
        return get_json(self.gateway.admin_port, "/status")

    def metrics(self) -> str:
        url = f"http://127.0.0.1:{self.gateway.admin_port}/metrics"
        with urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read(), "utf-8")

    def pool(self) -> Any:
        return self.status()["pools"][0]

    async def until(self, within: float = IDLE_TIMEOUT, **wanted: int) -> None:
        """Wait until the pool shows these figures."""
        end = time.monotonic() + within
        while True:
            pool = await asyncio.to_thread(self.pool)
            if all(pool[name] == value for name, value in wanted.items()):
                return
            shown = {name: pool[name] for name in wanted}
            assert time.monotonic() < end, f"after {within} s the pool shows {shown}, not {wanted}"
            await asyncio.sleep(0.02)

    async def until_draining(self) -> None:
        while not (await asyncio.to_thread(self.status))["draining"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def fetch(self, data: bytes, within: float = 10.0) -> Response:
        return await fetch(self.port, data, within)

    async def assert_idle(self) -> None:
        """Nothing is held, nobody waits, no release came twice, and the whole pool can be had."""
        await self.until(reserved_blocks=0, live=0, waiting=0)
        status = await asyncio.to_thread(self.status)
        assert status["counters"]["double_releases"] == 0
        usable = status["pools"][0]["usable_blocks"]
        # As many choices as it takes for one request to reach the whole pool within the context.
        choices = next(n for n in range(1, 257) if usable % n == 0 and usable // n < self.context)
        body = payload(False, n=choices, max_tokens=usable // choices - 9)
        whole = request(body=body, script={"prompt_tokens": 10})
        answer = await self.fetch(whole)
        assert (answer.status, answer.header("x-kvgate-reserved-blocks")) == (200, str(usable)), answer
        await self.until(reserved_blocks=0, live=0, waiting=0)
