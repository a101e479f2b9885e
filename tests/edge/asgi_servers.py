"""ASGI servers as processes of their own, and applications for them. Imported by the tests and run by
the servers: `asgi_servers:NAME`, with what differs told by environment variables."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import httptools

from kvgate import Admission
from kvgate.asgi import AdmissionMiddleware, fields

HERE = Path(__file__).parent
WITHIN = 30.0
SERVERS = ("uvicorn", "hypercorn", "granian")


# --- applications


def admission() -> Admission:
    grace = float(os.environ.get("TEST_GRACE", "0.1"))
    total, context = int(os.environ.get("TEST_BLOCKS", "100")), int(os.environ.get("TEST_CONTEXT", "1000"))
    fraction = float(os.environ.get("TEST_FRACTION", "1.0"))
    return Admission.from_blocks(total, 1, context, safety_fraction=fraction, abort_grace=grace)


def options(gate: Admission | None = None) -> dict[str, Any]:
    workers = os.environ.get("TEST_WORKERS", "divide")
    return {
        "admission": gate or admission(),
        "routes": {"/generate": fields("prompt", "max_tokens")},
        "count": lambda shape: [len(part) if isinstance(part, str) else 10 for part in shape.parts],
        "max_wait": float(os.environ.get("TEST_MAX_WAIT", "0")),
        "workers": int(workers) if workers.isdigit() else workers,
    }


class Log:
    """What the application saw, for `/seen`."""

    def __init__(self) -> None:
        self.running = 0
        self.disconnects = 0
        self.gate: Admission | None = None

    def page(self) -> dict[str, Any]:
        books = {} if self.gate is None else self.gate.snapshot()
        return {"running": self.running, "disconnects": self.disconnects, "pid": os.getpid(), **books}


def _events(asked: dict[str, Any], log: Log) -> AsyncIterator[bytes]:
    async def events() -> AsyncIterator[bytes]:
        log.running += 1
        try:
            for number in range(asked["max_tokens"]):
                yield b"data: %d\n\n" % number
                await asyncio.sleep(asked.get("pause", 0.0))
        except BaseException:
            log.disconnects += 1
            raise
        finally:
            log.running -= 1

    return events()


def fastapi_app() -> Any:
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, StreamingResponse
    from starlette.middleware.base import BaseHTTPMiddleware

    log, gate = Log(), admission()
    log.gate = gate
    app = FastAPI()

    @app.get("/seen")
    async def seen() -> Any:
        return log.page()

    @app.post("/free")
    async def free(request: Request) -> Any:
        return {"bytes": len(await request.body())}

    @app.post("/generate")
    async def generate(request: Request) -> Any:
        raw = await request.body()
        asked = json.loads(raw)
        if asked.get("stream"):
            return StreamingResponse(_events(asked, log), media_type="text/event-stream")
        length = request.headers.get("content-length")
        return JSONResponse({"cap": asked["max_tokens"], "bytes": len(raw), "length": length})

    async def touch(request: Any, call_next: Any) -> Any:
        response = await call_next(request)
        response.headers["x-touched"] = "yes"
        return response

    order = os.environ.get("TEST_ORDER", "plain")
    if order in ("below", "both"):
        app.add_middleware(BaseHTTPMiddleware, dispatch=touch)
    app.add_middleware(AdmissionMiddleware, **options(gate))
    if order in ("above", "both"):
        app.add_middleware(BaseHTTPMiddleware, dispatch=touch)
    return app


def starlette_app() -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, StreamingResponse
    from starlette.routing import Route

    log, gate = Log(), admission()
    log.gate = gate

    async def generate(request: Request) -> Any:
        raw = await request.body()
        asked = json.loads(raw)
        if asked.get("stream"):
            return StreamingResponse(_events(asked, log), media_type="text/event-stream")
        length = request.headers.get("content-length")
        return JSONResponse({"cap": asked["max_tokens"], "bytes": len(raw), "length": length})

    async def free(request: Request) -> Any:
        return JSONResponse({"bytes": len(await request.body())})

    async def seen(request: Request) -> Any:
        return JSONResponse(log.page())

    routes = [
        Route("/generate", generate, methods=["POST"]),
        Route("/free", free, methods=["POST"]),
        Route("/seen", seen),
    ]
    return AdmissionMiddleware(Starlette(routes=routes), **options(gate))


def litestar_app() -> Any:
    from litestar import Litestar, Request, get, post
    from litestar.response import Stream

    log, gate = Log(), admission()
    log.gate = gate

    @post("/generate", status_code=200)
    async def generate(request: Request[Any, Any, Any]) -> Any:
        raw = await request.body()
        asked = json.loads(raw)
        if asked.get("stream"):
            return Stream(_events(asked, log), media_type="text/event-stream")
        length = request.headers.get("content-length")
        return {"cap": asked["max_tokens"], "bytes": len(raw), "length": length}

    @post("/free", status_code=200)
    async def free(request: Request[Any, Any, Any]) -> dict[str, int]:
        return {"bytes": len(await request.body())}

    @get("/seen")
    async def seen() -> dict[str, Any]:
        return log.page()

    app = Litestar([generate, free, seen], request_max_body_size=None)
    return AdmissionMiddleware(app, **options(gate))


# --- a proxy as an application, so that the scripted engine can stand behind it


def proxy_app() -> Any:
    """The middleware in front of an application that passes everything on to TEST_ENGINE."""
    port = int(os.environ["TEST_ENGINE"])

    class Answer:
        def __init__(self) -> None:
            self.parser = httptools.HttpResponseParser(self)
            self.headers: list[tuple[bytes, bytes]] = []
            self.pieces: list[bytes] = []
            self.has_head = self.is_whole = False

        def on_header(self, name: bytes, value: bytes) -> None:
            if name.lower() not in (b"transfer-encoding", b"connection", b"keep-alive"):
                self.headers.append((name.lower(), value))

        def on_headers_complete(self) -> None:
            self.has_head = True

        def on_body(self, body: bytes) -> None:
            self.pieces.append(body)

        def on_message_complete(self) -> None:
            self.is_whole = True

    async def proxy(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            assert scope["type"] == "lifespan"
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        gone = asyncio.ensure_future(_until_gone(receive, writer))
        try:
            target = scope.get("raw_path") or scope["path"].encode()
            target += b"?" + scope["query_string"] if scope["query_string"] else b""
            head = b"%s %s HTTP/1.1\r\nhost: engine\r\n" % (scope["method"].encode(), target)
            for name, value in scope["headers"]:
                if name not in (b"host", b"content-length", b"transfer-encoding", b"connection", b"expect"):
                    head += b"%s: %s\r\n" % (name, value)
            writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            await _pass_answer(reader, Answer(), send)
        finally:
            gone.cancel()
            writer.transport.abort()

    async def _until_gone(receive: Any, writer: asyncio.StreamWriter) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        writer.transport.abort()

    async def _pass_answer(reader: asyncio.StreamReader, answer: Answer, send: Any) -> None:
        is_begun = False
        while not answer.is_whole:
            data = await reader.read(65536)
            if not data:
                answer.parser = None
                if is_begun:
                    raise ConnectionError("the engine broke off")
                await send({"type": "http.response.start", "status": 503, "headers": []})
                await send({"type": "http.response.body", "body": b"engine gone"})
                return
            answer.parser.feed_data(data)
            if answer.has_head and not is_begun:
                is_begun = True
                status = answer.parser.get_status_code()
                await send({"type": "http.response.start", "status": status, "headers": answer.headers})
            pieces, answer.pieces = answer.pieces, []
            for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return AdmissionMiddleware(
        proxy,
        admission(),
        engine="llamacpp",
        count=lambda shape: [10] * len(shape.parts),
        others="refuse",
        max_wait=float(os.environ.get("TEST_MAX_WAIT", "0")),
    )


# --- running them


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Running:
    """A server process. Ends with the block."""

    def __init__(self, server: str, app: str, *extra: str, waits: bool = True, **environment: str) -> None:
        self.port = free_port()
        self.app = app
        target = f"asgi_servers:{app}"
        at = ["--host", "127.0.0.1", "--port", str(self.port)]
        commands = {
            "uvicorn": ["uvicorn", "--factory", *at, "--log-level", "warning", target],
            "hypercorn": ["hypercorn", "--bind", f"127.0.0.1:{self.port}", f"{target}()"],
            "granian": [
                "granian",
                "--interface",
                "asgi",
                "--factory",
                "--workers-kill-timeout",
                "2",
                *at,
                target,
            ],
        }
        # A file and not a pipe, which would stop the server once it is full.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", *commands[server], *extra],
            cwd=HERE,
            env=os.environ | {"PYTHONPATH": str(HERE), **environment},
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        if waits:
            self._until_it_listens()

    def _until_it_listens(self) -> None:
        end = time.monotonic() + WITHIN
        while True:
            assert self.process.poll() is None, self.read()
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert time.monotonic() < end, "the server does not listen"
                time.sleep(0.02)

    def until_it_says(self, wanted: str) -> str:
        """All that it printed, once that is there."""
        end = time.monotonic() + WITHIN
        while wanted not in (said := self.read()):
            assert time.monotonic() < end, said
            time.sleep(0.02)
        return said

    def read(self) -> str:
        """What it printed so far."""
        return os.pread(self._log.fileno(), 1 << 20, 0).decode("utf-8", "replace")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)  # its workers too
            self.process.wait()
        self._log.close()
