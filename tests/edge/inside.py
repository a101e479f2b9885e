"""A gateway inside the test's own process, before an engine that keeps every byte it is sent.

Promises: what the engine saw is shown as whole requests (`Seen`), framed by the test's own strict
reader and not by the gateway's; a gateway is stopped, and its books looked at, when its block ends.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from kvgate.config import Settings, at
from kvgate.core.records import PoolFacts
from kvgate.edge.gateway import Gateway

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
COUNTED = b'HTTP/1.1 200 OK\r\ncontent-length: 13\r\n\r\n{"tokens":[1]}'
COMPLETION = b'{"prompt": [1, 2, 3], "max_tokens": 4}'
LENGTH = re.compile(rb"(?i)\r\ncontent-length: (\d+)\r\n")


@dataclass
class Engine:
    """Answers every request with `answer`. `seen`: heads and bodies; `rest`: bytes that are no request."""

    answer: bytes = ANSWER
    seen: list[tuple[bytes, bytes]] = field(default_factory=list)
    rest: bytes = b""

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = LENGTH.search(head)
                body = await reader.readexactly(int(length[1]) if length else 0)
                if not head.startswith(b"GET /v1/models "):
                    self.seen.append((head, body))
                writer.write(self.answer)
        except asyncio.IncompleteReadError as cut:
            self.rest += cut.partial
        except (ConnectionError, asyncio.CancelledError):
            pass  # the other side has gone, or the test is over
        finally:
            writer.close()


FACTS = PoolFacts(total_blocks=1000, block_size=1, context=500)


@asynccontextmanager
async def gateway_before(upstream: str, **settings: Any) -> AsyncIterator[Gateway]:
    """A gateway before `upstream`. At the end nothing may be held or waiting."""
    chosen = replace(
        Settings(
            upstreams=at(upstream),
            engine="llamacpp",
            listen_port=0,
            abort_grace=0.0,
            max_wait=0.0,
            drain_timeout=0.0,
            watch_engine_metrics=False,
        ),
        **settings,
    )
    gateway = Gateway(chosen, FACTS)
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop()
        await settle()
    assert gateway.gate.ledger.reserved_blocks == 0
    assert len(gateway.gate.line) == 0
    assert gateway.gate.ledger.double_releases == 0
    await until(lambda: not gateway.clients)
    assert gateway.bodies.held == 0


@asynccontextmanager
async def gateway_and_engine(
    answer: bytes = ANSWER, **settings: Any
) -> AsyncIterator[tuple[Gateway, Engine]]:
    engine = Engine(answer)
    server = await asyncio.start_server(engine.talk, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        async with gateway_before(f"http://127.0.0.1:{port}", **settings) as gateway:
            yield gateway, engine
    finally:
        server.close()


async def settle() -> None:
    """End what the engine's side still does, so that nothing of it outlives the loop."""
    for _ in range(5):
        await asyncio.sleep(0)  # a connection taken in the last moment begins to be talked on
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.sleep(0)


async def until(is_so: Callable[[], bool], within: float = 5.0) -> None:
    """Wait until something holds; polled, because it is the gateway's own state."""
    async with asyncio.timeout(within):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def exchange(port: int, data: bytes, *, within: float = 5.0, is_ended: bool = True) -> bytes:
    """Send `data` and half-close where `is_ended`; all that comes until the gateway closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        async with asyncio.timeout(within):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()
