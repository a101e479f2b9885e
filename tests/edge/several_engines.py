"""Scripted engines that keep what they are sent, and a gateway before several of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from harness import Client, Response, fetch, request
from inside import LENGTH, settle

from kvgate.config import Settings, UpstreamSettings
from kvgate.edge.gateway import Gateway
from kvgate.wire.engines.found import Page

COMPLETIONS = "/v1/completions"


@dataclass
class Fake:
    """An engine that serves `names`, and holds each generation until `go` is set."""

    names: tuple[str, ...] = ("m",)
    more: dict[str, Any] = field(default_factory=dict)
    listing: bytes | None = None
    pages: dict[str, Page] = field(default_factory=dict)
    seen: list[tuple[bytes, dict[str, Any]]] = field(default_factory=list)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    status: bytes = b"200 OK"  # of generations
    held: int = 0
    most: int = 0
    server: asyncio.Server | None = None
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def listen(self, port: int = 0) -> None:
        self.server = await asyncio.start_server(self._talk, "127.0.0.1", port)
        self.port = self.server.sockets[0].getsockname()[1]

    def close(self) -> None:
        if self.server is not None:
            self.server.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = LENGTH.search(head)
                body = await reader.readexactly(int(length[1]) if length else 0)
                answer = await self._serve(head, body, reader)
                is_generation = head.startswith(b"POST /v1/completions")
                writer.write(_answer(answer, self.status if is_generation else b"200 OK"))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _serve(self, head: bytes, body: bytes, reader: asyncio.StreamReader) -> bytes:
        method, path = head.split(b" ", 2)[:2]
        if method == b"GET" and path.decode() in self.pages:
            return self.pages[path.decode()].text.encode()
        if head.startswith(b"GET /v1/models "):
            objects = [{"id": name, "object": "model", **self.more} for name in self.names]
            return json.dumps({"data": objects}).encode() if self.listing is None else self.listing
        shown = json.loads(body) if body else {}
        self.seen.append((head.lower(), shown))
        if not head.startswith(b"POST /v1/completions"):
            return b'{"tokens": [1, 2, 3], "count": 3, "input_tokens": 3}'
        held = len(shown["prompt"]) + shown["max_tokens"] - 1
        self.held += held
        self.most = max(self.most, self.held)
        try:
            waiting = asyncio.ensure_future(self.go.wait())
            gone = asyncio.ensure_future(reader.read(1))
            await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            gone.cancel()
            await asyncio.gather(waiting, gone, return_exceptions=True)
        finally:
            self.held -= held
        return json.dumps({"from": self.port}).encode()

    @property
    def generations(self) -> list[tuple[bytes, dict[str, Any]]]:
        return [each for each in self.seen if each[0].startswith(b"post /v1/completions")]


def _answer(body: bytes, status: bytes) -> bytes:
    head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


@asynccontextmanager
async def before(
    engines: list[Fake], each: Callable[[int, Fake], dict[str, Any]] | None = None, **settings: Any
) -> AsyncIterator[Gateway]:
    """A gateway before `engines` of 100 blocks (90 usable). At the end nothing is held anywhere."""
    for engine in engines:
        if engine.server is None:
            await engine.listen()
    chosen = Settings(
        upstreams=tuple(
            UpstreamSettings(**{"url": e.url, "label": f"e{n}"} | (each(n, e) if each else {}))
            for n, e in enumerate(engines)
        ),
        engine="llamacpp",
        total_blocks=100,
        block_size=1,
        context=100,
        listen_port=0,
        abort_grace=0.0,
        drain_timeout=0.0,
        max_wait=0.0,
        watch_engine_metrics=False,
    )
    gateway = Gateway(replace(chosen, **settings))
    await gateway.start()
    try:
        yield gateway
    finally:
        for engine in engines:
            engine.go.set()
        await gateway.stop()
        for engine in engines:
            engine.close()
        await settle()
    for upstream in gateway.upstreams:
        ledger = upstream.gate.ledger
        assert (ledger.reserved_blocks, len(upstream.gate.line), ledger.double_releases) == (0, 0, 0)


def ask(model: Any = "m", tokens: int = 40, *, headers: str = "", prompt: int = 3) -> bytes:
    """A completion of token ids, so that nothing is counted: it needs `tokens` blocks."""
    body = {"model": model, "prompt": [1] * prompt, "max_tokens": tokens - prompt + 1}
    return request(COMPLETIONS, {k: v for k, v in body.items() if v is not ...}, headers=headers)


async def sent(gateway: Gateway, data: bytes) -> Client:
    client = await Client.connect(gateway.port)
    client.send(data)
    return client


async def answered(gateway: Gateway, data: bytes) -> Response:
    return await fetch(gateway.port, data)
