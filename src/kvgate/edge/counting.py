"""Exact prompt tokens, asked of the engine itself, bounded in time and in number at once."""

from __future__ import annotations

import asyncio

from kvgate.edge.relay.heads import Headers, request_head
from kvgate.edge.relay.pool import EnginePool, EngineUnavailable, Fetched
from kvgate.wire.dialects.openai import Shape
from kvgate.wire.engines import CountCall, CountPlan, Engine, NoCount

# llama.cpp answers from a small thread pool that its streams share; a storm of counting calls
# must not keep them waiting.
CALLS_AT_ONCE = 8


class CountRefused(Exception):
    """The engine answered a counting call with an error of its own; it is the client's to read."""

    def __init__(self, answer: Fetched) -> None:
        super().__init__(f"the engine answered {answer.status} to a counting call")
        self.answer = answer


class Counter:
    """Counts prompts through the engine's counting endpoints."""

    def __init__(self, pool: EnginePool, engine: Engine, timeout: float) -> None:
        self._pool = pool
        self._engine = engine
        self.timeout = timeout
        self._turn = asyncio.Semaphore(CALLS_AT_ONCE)

    def plan(self, shape: Shape) -> CountPlan:
        """What is asked of the engine, and what is known without asking."""
        return self._engine.plan(shape)

    async def count(self, plan: CountPlan, headers: Headers, peer: bytes) -> tuple[int, ...]:
        """Tokens of each prompt. Raises `EngineUnavailable` or `CountRefused`."""
        try:
            async with asyncio.timeout(self.timeout):
                return tuple(
                    [sum([await self._one(term, headers, peer) for term in part]) for part in plan.parts]
                )
        except TimeoutError:
            raise EngineUnavailable(f"no prompt count within {self.timeout:g} s") from None

    async def _one(self, call: CountCall | int, headers: Headers, peer: bytes) -> int:
        if isinstance(call, int):
            return call
        # Accept-Encoding stays behind: the answer is read here.
        head = request_head(
            b"POST",
            self._pool.prefix + call.path.encode("ascii"),
            self._pool.authority,
            headers,
            body_bytes=len(call.body),
            peer=peer,
            drop=self._engine.drop_headers | {b"accept-encoding", b"content-type"},
        )
        head = head[:-2] + b"content-type: application/json\r\n\r\n"
        async with self._turn:
            answer = await self._pool.fetch(head + call.body)
        if 400 <= answer.status < 500:
            raise CountRefused(answer)
        if answer.status != 200:
            raise EngineUnavailable(f"the engine answered {answer.status} to a counting call")
        try:
            return call.read(answer.body)
        except NoCount as error:
            raise EngineUnavailable(f"the counting call gave no count: {error}") from None
