"""Prompt tokens asked of the engine itself, bounded in time and in number at once.

Promises: the answer comes once, within `timeout` seconds, from the turn in the line to the last call;
the same call is not made twice within `REMEMBER_SECONDS`, and nothing is remembered across an outage,
after which the engine may serve another model. A call is a callback on a pooled connection: no task
is made for it unless the connection has to be made.
"""

from __future__ import annotations

import asyncio
from collections import deque
from hashlib import blake2b
from typing import TypeAlias

from kvgate.edge.counting.counted import Answer, Counted, CountRefused, Outcome
from kvgate.edge.relay.engine import EngineConnection
from kvgate.edge.relay.heads import Headers, request_head
from kvgate.edge.relay.pool import EnginePool, EngineUnavailable, Fetched
from kvgate.tokens.cache import CountCache
from kvgate.wire.engines import CountCall, CountPlan, Engine, NoCount

# llama.cpp answers from a small thread pool that its streams share; a storm of counting calls
# must not keep them waiting.
CALLS_AT_ONCE = 8
CACHE_BYTES = 1 << 20
REMEMBER_SECONDS = 300.0
# A list of token ids is read for its length alone.
ANSWER_BYTES_MAX = 64 << 20
# Accept-Encoding stays behind: the answer is read here.
_OURS = frozenset({b"accept-encoding", b"content-type"})


# Headers that differ from one try or one client to the next, and choose no model.
_PERSONAL = frozenset(
    {
        *(b"host", b"connection", b"content-length", b"content-type", b"user-agent", b"authorization"),
        *(b"accept", b"accept-encoding", b"accept-language", b"cookie", b"traceparent", b"tracestate"),
        *(b"x-request-id", b"x-api-key", b"x-forwarded-for", b"idempotency-key"),
    }
)

Call: TypeAlias = tuple[int, bytes, CountCall]
"""A call that has to be made: for which part, the key of its count, and itself."""


def _is_personal(name: bytes) -> bool:
    return name in _PERSONAL or name.startswith(b"x-stainless-")


class EngineCounts:
    """Counts through the counting endpoints of one engine."""

    def __init__(self, pool: EnginePool, engine: Engine, timeout: float) -> None:
        self.pool = pool
        self.engine = engine
        self.timeout = timeout
        self.cache = CountCache(CACHE_BYTES)
        self.calls = 0
        self._fresh_until = 0.0
        self._running = 0
        self._waiting: deque[EngineCounting] = deque()

    def begin(
        self, plan: CountPlan, headers: Headers, peer: bytes, answer: Answer
    ) -> Counted | EngineCounting:
        """The counts of the plan's parts where all are remembered; else ask, and `answer` gets them."""
        sums = [0] * len(plan.parts)
        calls: list[Call] = []
        for index, terms in enumerate(plan.parts):
            for term in terms:
                if isinstance(term, int):
                    sums[index] += term
                    continue
                key = self.key(term, headers)
                known = self.cache.get(key)
                if known is None:
                    calls.append((index, key, term))
                else:
                    sums[index] += known
        if not calls:
            return Counted(tuple(sums), plan.source)
        counting = EngineCounting(self, plan.source, sums, calls, headers, peer, answer)
        if self._running < CALLS_AT_ONCE:
            self._running += 1
            counting.go()
        else:
            self._waiting.append(counting)
        return counting

    def key(self, call: CountCall, headers: Headers) -> bytes:
        """By which the count of a call is remembered.

        A router behind this gateway may choose the model by a header: they are part of the key.
        """
        now = self.pool.loop.time()
        if now >= self._fresh_until:
            self._fresh_until = now + REMEMBER_SECONDS
            self.cache.clear()
        named = [name + b":" + value for name, value in headers if not _is_personal(name.lower())]
        whole = b"\0".join((call.path.encode("ascii"), *named, call.body))
        return blake2b(whole, digest_size=16).digest()

    def leave(self, counting: EngineCounting, *, was_running: bool) -> None:
        """One is over; the next may go."""
        if not was_running:
            self._waiting.remove(counting)
            return
        if self._waiting:
            self._waiting.popleft().go()
        else:
            self._running -= 1

    @property
    def waiting(self) -> int:
        return len(self._waiting)


class EngineCounting:
    """The calls of one plan, one after the other. A `Receiver` of their answers.

    `sums`: what is known of each part already, in the order of the plan.
    """

    # fmt: off
    __slots__ = (
        "_answer", "_calls", "_connecting", "_connection", "_counts", "_head", "_headers", "_is_retry",
        "_key", "_peer", "_phrase", "_pieces", "_read", "_request", "_size", "_source", "_status", "_sums",
        "_timer", "is_over", "is_running",
    )
    # fmt: on

    def __init__(
        self,
        counts: EngineCounts,
        source: str,
        sums: list[int],
        calls: list[Call],
        headers: Headers,
        peer: bytes,
        answer: Answer,
    ) -> None:
        self._counts = counts
        self._source = source
        self._sums = sums
        self._calls = deque(calls)
        self._headers = headers
        self._peer = peer
        self._answer = answer
        self._connection: EngineConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._request = b""
        self.is_running = False
        self.is_over = False
        self._timer = counts.pool.loop.call_later(counts.timeout, self._late)

    def go(self) -> None:
        """It is this one's turn."""
        self.is_running = True
        if not self._next():
            # Never inside `begin`: whoever asked has not got hold of this yet.
            self._counts.pool.loop.call_soon(self._done_with, self._sum())

    def cancel(self) -> None:
        if not self.is_over:
            self._end()

    def _next(self) -> bool:
        """Make the next call that has to be made; False where there is none left."""
        counts = self._counts
        while self._calls:
            index, key, call = self._calls.popleft()
            # Another one may have asked the same since.
            known = counts.cache.get(key)
            if known is not None:
                self._sums[index] += known
                continue
            self._key, self._read = (index, key), call.read
            left_out, lines = counts.pool.access.towards
            head = request_head(
                b"POST",
                counts.pool.prefix + call.path.encode("ascii"),
                counts.pool.authority,
                self._headers,
                body_bytes=len(call.body),
                peer=self._peer,
                drop=counts.engine.drop_headers | _OURS | left_out,
            )
            self._request = b"%b%bcontent-type: application/json\r\n\r\n%b" % (head[:-2], lines, call.body)
            self._is_retry = False
            counts.calls += 1
            self._send()
            return True
        return False

    def _sum(self) -> Counted:
        return Counted(tuple(self._sums), self._source)

    def _send(self) -> None:
        pool = self._counts.pool
        connection = pool.take_idle()
        if connection is None:
            self._connecting = pool.loop.create_task(self._connect())
        else:
            self._transmit(connection)

    async def _connect(self) -> None:
        try:
            connection = await self._counts.pool.connect()
        except EngineUnavailable as error:
            self._connecting = None
            self._unavailable(error)
        else:
            self._connecting = None
            self._transmit(connection)

    def _transmit(self, connection: EngineConnection) -> None:
        self._connection = connection
        self._pieces: list[bytes] = []
        self._size = 0
        connection.send(self._request, self, is_head=False)

    # --- from the connection

    def head(self, status: int, phrase: bytes, headers: Headers, framing: str) -> None:
        self._status, self._phrase, self._head = status, phrase, headers

    def data(self, piece: bytes) -> None:
        self._size += len(piece)
        self._pieces.append(piece)
        if self._size > ANSWER_BYTES_MAX:
            self._unavailable(EngineUnavailable("its answer to a counting call is too large"))

    def done(self) -> None:
        self._connection = None
        if self.is_over:
            return
        body = b"".join(self._pieces)
        if 400 <= self._status < 500:
            self._done_with(CountRefused(Fetched(self._status, self._phrase, self._head, body)))
            return
        if self._status != 200:
            what = f"the engine answered {self._status} to a counting call"
            self._unavailable(EngineUnavailable(what))
            return
        try:
            tokens = self._read(body)
        except NoCount as error:
            self._unavailable(EngineUnavailable(f"the counting call gave no count: {error}"))
            return
        index, key = self._key
        self._sums[index] += tokens
        self._counts.cache.put(key, tokens)
        if not self._next():
            self._done_with(self._sum())

    def failed(self, why: str) -> None:
        connection, self._connection = self._connection, None
        if self.is_over:
            return
        # The engine may close an idle connection just as it is used; these calls are safe to repeat.
        is_stale = connection is not None and connection.requests > 1 and not connection.got_bytes
        if is_stale and not self._is_retry:
            self._is_retry = True
            self._connecting = self._counts.pool.loop.create_task(self._connect())
            return
        self._unavailable(EngineUnavailable(why))

    # --- endings

    def _late(self) -> None:
        self._unavailable(EngineUnavailable(f"no prompt count within {self._counts.timeout:g} s"))

    def _unavailable(self, error: EngineUnavailable) -> None:
        self._counts.cache.clear()
        self._done_with(error)

    def _done_with(self, outcome: Outcome) -> None:
        if not self.is_over:
            self._end()
            self._answer(outcome)

    def _end(self) -> None:
        self.is_over = True
        self._timer.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abandon(self)
        self._counts.leave(self, was_running=self.is_running)
