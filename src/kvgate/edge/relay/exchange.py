"""One request, from its bytes to its release. START READING HERE.

    RECEIVED -> COUNTING -> WAITING -> CONNECTING -> SENDING -> STREAMING -> ENDED

Bytes become a shape (`wire`), the shape gets exact token counts (`counting`), the gate answers
(`gatekeeper`), the engine gets the body with the reserved cap written into it, and its answer is
passed on as it comes. Whatever happens, `_end` runs once and gives the reservation back: at once
where the engine has finished or was never asked, after its abort grace where it was cut off.

There is no await between asking and holding: everything is a callback on the loop's thread, so
no cancellation can come between a grant and its owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from kvgate.core.records import Ending, Granted, Key, Reason, Refused
from kvgate.edge import clock
from kvgate.edge.counting import CountRefused
from kvgate.edge.relay import answers
from kvgate.edge.relay.engine import EngineConnection
from kvgate.edge.relay.heads import Headers, request_head
from kvgate.edge.relay.pool import EngineUnavailable
from kvgate.edge.relay.reply import Reply
from kvgate.edge.relay.request import Request
from kvgate.edge.relay.state import State
from kvgate.wire.body import BadBody
from kvgate.wire.dialects.openai import Shape, enforce
from kvgate.wire.routes import FREE_METHODS, reader_for, unpriced_message

if TYPE_CHECKING:
    from kvgate.edge.gateway import Gateway
    from kvgate.edge.relay.client import ClientConnection

# A reused connection that fails this soon, without a byte, was closed by the engine while idle.
STALE_SECONDS = 1.0


class Exchange:
    """A request and its answer. Receives the engine's response (`engine.Receiver`)."""

    # fmt: off
    __slots__ = (
        "_added", "_client", "_connection", "_gateway", "_is_paused", "_is_priced", "_is_retry",
        "_key", "_line_key", "_outgoing", "_reply", "_request", "_shape", "_started", "_task",
        "_wait", "state",
    )
    # fmt: on

    def __init__(self, gateway: Gateway, client: ClientConnection, request: Request) -> None:
        self._gateway = gateway
        self._client = client
        self._request = request
        self.state = State.RECEIVED
        self._key: Key | None = None
        self._line_key: Key | None = None
        self._shape: Shape | None = None
        self._connection: EngineConnection | None = None
        self._task: asyncio.Task[None] | None = None
        self._outgoing = b""
        self._added = b""
        self._is_priced = False
        self._is_paused = False
        self._is_retry = False
        self._wait = 0.0
        self._started = clock.now()

    # --- towards the engine

    def start(self) -> None:
        """Decide what the request is; price it, pass it on, or refuse it."""
        request = self._request
        self._gateway.requests += 1
        path = request.target.partition(b"?")[0]
        if self._gateway.is_draining:
            self._refuse(answers.decline(self._gateway, Reason.DRAINING, "The gateway is shutting down."))
            return
        read = reader_for(request.method, path)
        if read is not None:
            self._is_priced = True
            try:
                self._shape = read(request.body)
            except BadBody as error:
                self._refuse(answers.decline(self._gateway, Reason.INVALID_REQUEST, str(error)), error.param)
                return
            self._count(self._shape)
        elif request.method in FREE_METHODS or path in self._gateway.allow_paths:
            self._send(request.body)
        else:
            detail = unpriced_message(request.method, path)
            self._refuse(answers.decline(self._gateway, Reason.UNPRICED_ENDPOINT, detail))

    def _count(self, shape: Shape) -> None:
        known = self._gateway.counter.known(shape)
        if known is not None:
            self._counted(shape, known)
            return
        self.state = State.COUNTING
        self._task = self._gateway.loop.create_task(self._guarded(lambda: self._count_at_engine(shape)))

    async def _count_at_engine(self, shape: Shape) -> None:
        request = self._request
        try:
            prompts = await self._gateway.counter.count(shape, request.headers, self._client.peer)
        except CountRefused as error:
            self._end(Ending.FAILED, outcome="engine_error")
            self._answer(answers.engine_error(request, error.answer))
        except EngineUnavailable as error:
            self._refuse_unavailable(str(error))
        else:
            self._counted(shape, prompts)

    def _counted(self, shape: Shape, prompts: tuple[int, ...]) -> None:
        self.state = State.WAITING
        ask = self._gateway.ask_for(shape, prompts)
        self._line_key = self._gateway.keeper.ask(ask, self._answered)

    def _answered(self, given: Granted | Refused) -> None:
        self._line_key = None
        if isinstance(given, Refused):
            self._refuse(given)
            return
        # From here on the reservation is this exchange's, and `_end` gives it back.
        self._key = given.key
        self._wait = given.waited
        self._added = answers.admitted_headers(given)
        try:
            assert self._shape is not None
            body = enforce(self._shape, given.output_cap)
            self._shape = None  # the parsed body is not needed any more; streams are many and long
            self._send(body)
        except BaseException:
            self._end(Ending.FAILED)
            raise

    def _send(self, body: bytes) -> None:
        request = self._request
        pool = self._gateway.pool
        head = request_head(
            request.method,
            pool.prefix + request.target,
            pool.authority,
            request.headers,
            body_bytes=len(body),
            peer=self._client.peer,
            drop=self._gateway.engine.drop_headers,
        )
        self._outgoing = head + body
        request.body = b""
        connection = pool.take_idle()
        if connection is not None:
            self._transmit(connection)
        else:
            self._connect()

    def _connect(self) -> None:
        self.state = State.CONNECTING
        self._task = self._gateway.loop.create_task(self._guarded(self._connect_to_engine))

    async def _guarded(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """A defect of ours must not leave a client hanging or a reservation held."""
        try:
            await work()
        except Exception:
            self._end(Ending.FAILED)
            self._client.break_off(is_visible=False)
            raise

    async def _connect_to_engine(self) -> None:
        try:
            connection = await self._gateway.pool.connect()
        except EngineUnavailable as error:
            self._refuse_unavailable(str(error))  # nothing was sent, so the engine holds nothing
        else:
            self._transmit(connection)

    def _transmit(self, connection: EngineConnection) -> None:
        self.state = State.SENDING
        self._connection = connection
        connection.send(self._outgoing, self, is_head=self._request.method == b"HEAD")

    # --- from the engine

    def head(self, status: int, phrase: bytes, headers: Headers, framing: str) -> bool:
        self.state = State.STREAMING
        self._outgoing = b""
        is_http11 = self._request.is_http11
        self._reply = Reply(
            status,
            phrase,
            headers,
            framing,
            added=self._added,
            is_http11=is_http11,
            keep_alive=self._request.keep_alive,
        )
        return is_http11 or framing != "chunked"

    def data(self, piece: bytes) -> None:
        self._client.write(self._reply.piece(piece))

    def done(self) -> None:
        self._connection = None
        tail = self._reply.end()
        if tail:
            self._client.write(tail)
        self._gateway.pool.is_up = True
        self._end(Ending.COMPLETED if self._reply.status < 400 else Ending.FAILED)
        self._client.finished(keep_alive=self._request.keep_alive)

    def failed(self, why: str) -> None:
        connection, self._connection = self._connection, None
        assert connection is not None
        if self.state is State.SENDING:
            is_stale = connection.requests > 1 and not connection.got_bytes
            age = self._gateway.loop.time() - connection.last_byte
            if is_stale and age < STALE_SECONDS and not self._is_retry:
                self._is_retry = True
                self._connect()
                return
            self._refuse_unavailable(why, after=self._gateway.abort_grace)
            return
        self._end(Ending.FAILED, after=self._gateway.abort_grace)
        self._client.break_off(is_visible=self._reply.is_cut_visible)

    # --- from the client's side

    def client_gone(self) -> None:
        """The client has vanished, or is given up. Nothing is written any more."""
        state = self.state
        if state in (State.COUNTING, State.CONNECTING) and self._task is not None:
            self._task.cancel()
            self._task = None
        if self._line_key is not None:
            self._gateway.keeper.leave(self._line_key)
            self._line_key = None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abandon(self)
            self._end(Ending.CANCELLED, after=self._gateway.abort_grace)
        else:
            self._end(Ending.CANCELLED)

    def pause(self) -> None:
        self._is_paused = True
        if self._connection is not None:
            self._connection.transport.pause_reading()

    def resume(self) -> None:
        self._is_paused = False
        if self._connection is not None:
            self._connection.transport.resume_reading()

    def sweep(self, now: float) -> None:
        """Ends an exchange whose engine, or whose client, has been silent for too long."""
        connection = self._connection
        limit = self._gateway.settings.engine_idle_timeout
        if connection is None or now - connection.last_byte <= limit:
            return
        if self._is_paused:
            self._client.shut()
        else:
            connection.abandon(self)
            self.failed(f"the engine sent nothing for {limit:g} s")

    # --- endings

    def _refuse(self, refused: Refused, param: str | None = None, *, after: float = 0.0) -> None:
        self._end(Ending.FAILED, after=after, outcome=refused.reason.value)
        busy_status = self._gateway.settings.busy_status
        self._answer(answers.refusal(self._request, refused, busy_status=busy_status, param=param))

    def _refuse_unavailable(self, why: str, *, after: float = 0.0) -> None:
        refused = answers.decline(
            self._gateway, Reason.ENGINE_UNAVAILABLE, f"The engine is not available: {why}."
        )
        self._refuse(refused, after=after)

    def _answer(self, response: bytes) -> None:
        self._client.write(response)
        self._client.finished(keep_alive=self._request.keep_alive)

    def _end(self, ending: Ending, *, after: float = 0.0, outcome: str | None = None) -> None:
        """Give the reservation back, once."""
        if self.state is State.ENDED:
            return
        self.state = State.ENDED
        key, self._key = self._key, None
        if key is not None:
            self._gateway.keeper.ended(key, ending, after)
        if self._is_priced:
            seconds = clock.now() - self._started
            self._gateway.observe(outcome or ending.value, seconds, self._wait)
