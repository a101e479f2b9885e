"""One request, from its bytes to its release. START READING HERE.

    RECEIVED -> COUNTING -> COUNTED -> WAITING -> ADMITTED -> CONNECTING -> SENDING -> STREAMING
             -> DRAINING -> RELEASED                         (state.py has every way between them)

Bytes become a shape (`wire`), the shape gets exact token counts (`counting`), the gate answers
(`gatekeeper`), the engine gets the body with the reserved cap written into it, and its answer is
passed on as it comes (`reply`, `events`). Whatever happens, `Life._end` gives the reservation back
once: at once where the engine has finished or was never asked, after its abort grace where it was
cut off.

There is no await between asking and holding: everything is a callback on the loop's thread, so
no cancellation can come between a grant and its owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from kvgate.core.records import Ask, Ending, Granted, Key, Reason, Refused
from kvgate.edge.counting import CountRefused
from kvgate.edge.relay import answers
from kvgate.edge.relay.answer import Answer
from kvgate.edge.relay.engine import EngineConnection
from kvgate.edge.relay.heads import request_head
from kvgate.edge.relay.life import Life
from kvgate.edge.relay.pool import EngineUnavailable
from kvgate.edge.relay.request import Request
from kvgate.edge.relay.state import State
from kvgate.edge.relay.watch import Watch, watch_for
from kvgate.wire.body import BadBody
from kvgate.wire.dialects.openai import Shape, enforce
from kvgate.wire.engines import CountPlan
from kvgate.wire.routes import Route, is_free, route_for, unpriced_message

if TYPE_CHECKING:
    from kvgate.edge.gateway import Gateway
    from kvgate.edge.relay.client import ClientConnection

# A reused connection that fails this soon, without a byte, was closed by the engine while idle.
STALE_SECONDS = 1.0
_NOTHING: frozenset[bytes] = frozenset()
# A compressed event stream cannot be read, ended or passed on line by line.
_NO_ENCODING = frozenset({b"accept-encoding"})


class Exchange(Life):
    """A request, up to its answer (`answer.Answer`) and its end (`life.Life`)."""

    # fmt: off
    __slots__ = (
        "_answer", "_ask", "_client", "_connection", "_is_paused", "_is_retry", "_line_key",
        "_outgoing", "_request", "_route", "_shape", "_task",
    )
    # fmt: on

    _answer: Answer  # from sending on

    def __init__(self, gateway: Gateway, client: ClientConnection, request: Request) -> None:
        super().__init__(gateway)
        self._client = client
        self._request = request
        self._line_key: Key | None = None
        self._route: Route | None = None
        self._shape: Shape | None = None
        self._ask: Ask | None = None
        self._connection: EngineConnection | None = None
        self._task: asyncio.Task[None] | None = None
        self._outgoing = b""
        self._is_paused = False
        self._is_retry = False

    # --- towards the engine

    def start(self) -> None:
        """Decide what the request is; price it, pass it on, or refuse it."""
        request = self._request
        self._gateway.requests += 1
        path = request.target.partition(b"?")[0]
        if self._gateway.is_draining:
            self._refuse(answers.decline(self._gateway, Reason.DRAINING, "The gateway is shutting down."))
            return
        engine = self._gateway.engine
        is_allowed = path in self._gateway.allow_paths
        self._route = None if is_allowed else route_for(engine.routes, request.method, path)
        if self._route is not None:
            self._is_priced = True
            try:
                self._shape = self._route.read(request.body)
            except BadBody as error:
                self._refuse(answers.decline(self._gateway, Reason.INVALID_REQUEST, str(error)), error.param)
                return
            self._count(self._shape)
        elif is_allowed or is_free(engine.free_posts, request.method, path):
            self._send(request.body)
        else:
            detail = unpriced_message(request.method, path)
            self._refuse(answers.decline(self._gateway, Reason.UNPRICED_ENDPOINT, detail))

    def _count(self, shape: Shape) -> None:
        plan = self._gateway.counter.plan(shape)
        if plan.is_whole_context or plan.known is not None:
            self._counted(shape, plan.known if not plan.is_whole_context else None)
            return
        self._to(State.COUNTING)
        self._task = self._gateway.loop.create_task(self._guarded(lambda: self._count_at_engine(shape, plan)))

    async def _count_at_engine(self, shape: Shape, plan: CountPlan) -> None:
        request = self._request
        try:
            prompts = await self._gateway.counter.count(plan, request.headers, self._client.peer)
        except CountRefused as error:
            self._end(Ending.FAILED, outcome="engine_error")
            self._reply(answers.engine_error(request, error.answer))
        except EngineUnavailable as error:
            self._refuse_unavailable(str(error))
        else:
            self._counted(shape, prompts)

    def _counted(self, shape: Shape, prompts: tuple[int, ...] | None) -> None:
        self._to(State.COUNTED)
        self._ask = self._gateway.ask_for(shape, prompts)
        self._line_key = self._gateway.keeper.ask(self._ask, self._answered)
        if self._line_key is not None:
            self._to(State.WAITING)

    def _answered(self, given: Granted | Refused) -> None:
        self._line_key = None
        if isinstance(given, Refused):
            self._refuse(given)
            return
        shape, ask = self._shape, self._ask
        assert shape is not None
        assert ask is not None
        self._shape = self._ask = None  # a parsed body is not small; streams are many and long
        self._hold(given, ask, is_counted=not shape.priced_as_whole_context)
        may_ask = self._gateway.settings.read_usage and self._request.is_http11
        try:
            body = enforce(shape, given.output_cap, context=self._gateway.gate.facts.context)
            body, watch = watch_for(body, shape, self._gateway.engine.name, may_ask=may_ask)
            drop = _NO_ENCODING if shape.stream else _NOTHING
            self._send(body, drop, answers.admitted_headers(given), watch)
        except BaseException:
            self._end(Ending.FAILED)
            raise

    def _send(
        self, body: bytes, drop: frozenset[bytes] = _NOTHING, added: bytes = b"", watch: Watch | None = None
    ) -> None:
        request = self._request
        pool = self._gateway.pool
        head = request_head(
            request.method,
            pool.prefix + request.target,
            pool.authority,
            request.headers,
            body_bytes=len(body),
            peer=self._client.peer,
            drop=self._gateway.engine.drop_headers | drop,
        )
        self._outgoing = head + body
        request.body = b""
        self._answer = Answer(self, self._client, request, added=added, watch=watch)
        connection = pool.take_idle()
        if connection is not None:
            self._transmit(connection)
        else:
            self._connect()

    def _connect(self) -> None:
        self._to(State.CONNECTING)
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
        self._to(State.SENDING)
        self._connection = connection
        connection.send(self._outgoing, self._answer, is_head=self._request.method == b"HEAD")

    # --- from the answer

    def answer_begins(self) -> None:
        self._to(State.STREAMING)
        self._outgoing = b""

    def answer_whole(self, *, is_good: bool) -> None:
        self._connection = None
        self._gateway.pool.is_up = True
        self._end(Ending.COMPLETED if is_good else Ending.FAILED, usage=self._answer.usage)

    def answer_failed(self, why: str) -> None:
        connection, self._connection = self._connection, None
        assert connection is not None
        if self.state is State.STREAMING:
            self._end(Ending.FAILED, after=self._gateway.abort_grace, usage=self._answer.usage)
            self._answer.break_off(Reason.ENGINE_UNAVAILABLE, f"The engine broke off in its answer: {why}.")
            return
        is_stale = connection.requests > 1 and not connection.got_bytes
        age = self._gateway.loop.time() - connection.last_byte
        if is_stale and age < STALE_SECONDS and not self._is_retry:
            self._is_retry = True
            self._connect()
            return
        self._refuse_unavailable(why, after=self._gateway.abort_grace)

    # --- from the client's side

    def client_gone(self) -> None:
        """The client has vanished, or is given up. Nothing is written any more."""
        self._withdraw()
        self._end(Ending.CANCELLED, after=self._leave_engine())

    def break_off(self, message: str) -> None:
        """The gateway stops and waits no longer: the client is told so in the form that its answer
        has by now, and the engine is left."""
        if self.is_over:
            return
        is_begun = self.state is State.STREAMING
        self._withdraw()
        after = self._leave_engine()
        self._request.keep_alive = False
        if is_begun:
            self._end(Ending.CANCELLED, after=after, usage=self._answer.usage)
            self._answer.break_off(Reason.DRAINING, message)
        else:
            self._refuse(answers.decline(self._gateway, Reason.DRAINING, message), after=after)

    def _withdraw(self) -> None:
        """Stop what has not reached the engine yet."""
        if self.state in (State.COUNTING, State.CONNECTING) and self._task is not None:
            self._task.cancel()
            self._task = None
        if self._line_key is not None:
            self._gateway.keeper.leave(self._line_key)
            self._line_key = None

    def _leave_engine(self) -> float:
        """Drop the connection, if there is one. Returns how long the engine may still hold memory."""
        connection, self._connection = self._connection, None
        if connection is None:
            return 0.0
        connection.abandon(self._answer)
        return self._gateway.abort_grace

    def pause(self) -> None:
        self._is_paused = True
        if self._connection is not None:
            self._connection.transport.pause_reading()

    def resume(self) -> None:
        self._is_paused = False
        if self._connection is not None:
            self._connection.last_byte = self._gateway.loop.time()  # it could not be heard before
            self._connection.transport.resume_reading()

    def sweep(self, now: float) -> None:
        """Ends an exchange whose engine has been silent for too long. A client that takes nothing,
        so that the engine is not listened to, is the client connection's business."""
        connection = self._connection
        limit = self._gateway.settings.engine_idle_timeout
        if connection is None or self._is_paused or now - connection.last_byte <= limit:
            return
        connection.abandon(self._answer)
        self.answer_failed(f"the engine sent nothing for {limit:g} s")

    # --- endings

    def _refuse(self, refused: Refused, param: str | None = None, *, after: float = 0.0) -> None:
        self._end(Ending.FAILED, after=after, outcome=refused.reason.value)
        busy_status, route = self._gateway.settings.busy_status, self._route
        answer = answers.refusal(self._request, refused, busy_status=busy_status, param=param, route=route)
        self._reply(answer)

    def _refuse_unavailable(self, why: str, *, after: float = 0.0) -> None:
        refused = answers.decline(
            self._gateway, Reason.ENGINE_UNAVAILABLE, f"The engine is not available: {why}."
        )
        self._refuse(refused, after=after)

    def _reply(self, response: bytes) -> None:
        self._client.write(response)
        self._client.finished(keep_alive=self._request.keep_alive)
