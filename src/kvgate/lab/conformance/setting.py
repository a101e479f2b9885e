"""What every case works with: the gateway's address, the engine behind it, the pool's sizes.

Promises: each request can be marked, so that the engine's view of it is known whatever the gateway
does to its head; all clients opened by a case are gone when it is over.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvgate.lab.conformance.case import Failed, expect
from kvgate.lab.conformance.control import EngineControl, host_and_port
from kvgate.lab.conformance.raw_client import Answer, Client

CHAT, COMPLETIONS, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
PROMPT = 10  # tokens that the engine counts for a prompt, unless a case says otherwise
RELEASE_SECONDS = 1.5  # for the gateway to close its connection to the engine: 1 s, and our own slack
IDLE_SECONDS = 5.0  # for the whole pool to be free again


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV cache that the gateway was told to guard. Tokens are blocks times block size."""

    total_blocks: int = 4096
    block_size: int = 1
    context: int = 2048
    safety_fraction: float = 0.9
    abort_grace: float = 1.5  # seconds for which the room of a request that was broken off stays held

    @property
    def usable(self) -> int:
        """Tokens that may be reserved."""
        return int(self.total_blocks * self.safety_fraction) * self.block_size

    @property
    def total(self) -> int:
        return self.total_blocks * self.block_size


class Unreachable(Exception):
    """There is no gateway at the address."""


class Setting:
    """One run against one gateway."""

    def __init__(
        self,
        gateway: str,
        engine: EngineControl,
        pool: Pool,
        *,
        model: str = "scripted",
        headers: Sequence[str] = (),
        gateway_pid: int | None = None,
    ) -> None:
        self.host, self.port = host_and_port(gateway)
        self.engine = engine
        self.pool = pool
        self.model = model
        self.gateway_pid = gateway_pid
        self._headers = "".join(f"{header}\r\n" for header in headers)
        self._clients: list[Client] = []
        self._unfinished = 0
        self.left_before = 0  # open at the engine when the case began

    async def reach(self) -> None:
        """Raises `Unreachable` unless something listens at the gateway's address."""
        try:
            (await self.connect()).cut()
        except OSError as error:
            raise Unreachable(f"no gateway listens at {self.host}:{self.port}: {error}") from None

    # --- requests

    async def plan(self, **script: Any) -> str:
        """A marker whose requests get this script."""
        return await self.engine.plan(**{"prompt_tokens": PROMPT} | script)

    def body(self, marker: str, *, stream: bool = True, **fields: Any) -> bytes:
        """A small chat body. A field set to `...` is left out."""
        shown: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": f"hello {marker}"}],
            "max_tokens": 16,
            "stream": stream,
        }
        return json.dumps({k: v for k, v in (shown | fields).items() if v is not ...}).encode()

    def head(self, method: str, path: str, lines: str) -> bytes:
        """A request head; `lines` are whole header lines."""
        start = f"{method} {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n{self._headers}"
        return f"{start}{lines}\r\n".encode("latin-1")

    def post(self, body: bytes, path: str = CHAT, lines: str = "") -> bytes:
        framing = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return self.head("POST", path, framing + lines) + body

    # --- connections

    async def connect(self, *, receive_buffer: int | None = None) -> Client:
        client = await Client.connect(self.host, self.port, receive_buffer=receive_buffer)
        self._clients.append(client)
        return client

    async def send(self, data: bytes) -> Client:
        """A connection of its own on which this has been sent."""
        client = await self.connect()
        client.send(data)
        return client

    async def fetch(self, data: bytes, within: float = 5.0) -> Answer:
        client = await self.send(data)
        try:
            return await client.answer(within)
        finally:
            client.close()

    async def started(self, marker: str, *, events: int = 1, **fields: Any) -> Client:
        """A stream that runs: its first events are here. Raises `Failed` where it does not come so far."""
        client = await self.send(self.post(self.body(marker, **fields)))
        if not await client.events(events):
            seen = str(client.answers[-1]) if client.answers else "nothing"
            raise Failed(f"a stream that should run did not begin: {seen}")
        return client

    def leave(self) -> None:
        """All clients go."""
        for client in self._clients:
            client.cut()
        self._clients.clear()

    # --- what the engine saw

    async def reached(self, marker: str, within: float = 3.0) -> dict[str, Any]:
        """The engine's record of the marked generation, as soon as it is there."""
        seen = await self.engine.arrived(marker, within)
        if seen is None:
            raise Failed("the request did not reach the engine")
        return seen

    async def released(self, marker: str, after: str) -> None:
        """The gateway closes the marked request at the engine soon."""
        started = time.monotonic()
        gone = await self.engine.ended(marker, RELEASE_SECONDS)
        if not gone:
            expect(
                await self.engine.ended(marker, 1.0),
                f"{after}, the engine's request was still open after {RELEASE_SECONDS + 1:g} s",
            )
            raise Failed(f"{after}, the engine's request stayed open for {time.monotonic() - started:.1f} s")

    # --- the standard end check

    async def end_check(self) -> None:
        """Nothing is open at the engine, and a request the size of the whole pool is admitted."""
        await self.settle()
        end = time.monotonic() + IDLE_SECONDS
        while True:
            marker = await self.plan(chunks=1)
            answer = await self.fetch(self.post(self.whole_pool(marker)))
            if answer.status == 200:
                return
            expect(
                time.monotonic() < end,
                f"end check: a request of the whole pool got {answer} {IDLE_SECONDS:g} s after the end",
            )
            await asyncio.sleep(0.5)

    async def begin(self) -> None:
        """A case begins: what an earlier one left open at the engine is not held against it."""
        self.left_before = (await self.engine.stats())["open"]

    async def settle(self) -> None:
        """All clients go, and what they left behind has the time to end. Asks for nothing: a gate may
        remember whom it told to come back."""
        self.leave()
        end = time.monotonic() + IDLE_SECONDS
        while (left := (stats := await self.engine.stats())["open"] - self.left_before) > 0:
            expect(time.monotonic() < end, f"end check: {left} requests are open at the engine")
            await asyncio.sleep(0.02)
        if stats["unfinished"] != self._unfinished:
            self._unfinished = stats["unfinished"]
            await asyncio.sleep(self.pool.abort_grace)

    def sized(self, marker: str, tokens: int, **fields: Any) -> bytes:
        """A chat body that may come to hold this many tokens: the prompt, and the rest as its cap."""
        return self.body(marker, **self.size(tokens) | fields)

    def whole_pool(self, marker: str) -> bytes:
        """A body that may come to hold all that is usable."""
        return self.sized(marker, self.pool.usable, stream=False)

    def size(self, tokens: int) -> dict[str, int]:
        """The cap and the number of choices with which a request reaches this many tokens.

        The last token of a sequence is never stored, so prompt + cap - 1 are.
        """
        size = self.pool.block_size
        blocks = max(1, tokens // size)
        # As many choices as it takes to stay within the context, each a whole number of blocks.
        for choices in range(1, 129):
            each = blocks // choices * size
            if each < self.pool.context and blocks % choices == 0:
                return {"max_tokens": each - PROMPT + 1} | ({"n": choices} if choices > 1 else {})
        raise Failed(f"no number of choices reaches {blocks} blocks within a context of {self.pool.context}")
