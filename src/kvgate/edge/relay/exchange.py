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

from typing import TYPE_CHECKING

from kvgate.core.records import Ending, Granted, Reason
from kvgate.edge.relay import own_answers
from kvgate.edge.relay.answer import Answer
from kvgate.edge.relay.asking import Asking
from kvgate.edge.relay.engine import EngineConnection
from kvgate.edge.relay.heads import request_head
from kvgate.edge.relay.host import Host
from kvgate.edge.relay.late_answer import LateAnswer
from kvgate.edge.relay.pool import EngineUnavailable
from kvgate.edge.relay.state import State
from kvgate.edge.relay.watch import Watch, watch_for
from kvgate.wire.dialects.openai import Shape, enforce
from kvgate.wire.refusal import Dialect

if TYPE_CHECKING:
    from kvgate.edge.relay.client import ClientConnection
    from kvgate.edge.relay.request import Request

# A reused connection that fails this soon, without a byte, was closed by the engine while idle.
STALE_SECONDS = 1.0
_NOTHING: frozenset[bytes] = frozenset()
# A compressed event stream cannot be read, ended or passed on line by line.
_NO_ENCODING = frozenset({b"accept-encoding"})


class Exchange(Asking):
    """A request, from its place in a pool (`asking.Asking`) to its answer (`answer.Answer`) and its end
    (`life.Life`)."""

    __slots__ = ("_answer", "_connection", "_is_paused", "_is_retry", "_outgoing")

    _answer: Answer  # from sending on

    def __init__(self, gateway: Host, client: ClientConnection, request: Request) -> None:
        super().__init__(gateway, client, request)
        self._connection: EngineConnection | None = None
        self._outgoing = b""
        self._is_paused = False
        self._is_retry = False

    # --- towards the engine

    def _granted(self, given: Granted, shape: Shape) -> None:
        upstream = self._upstream
        may_ask = self._gateway.settings.read_usage and self._request.is_http11
        body = enforce(shape, given.output_cap, context=upstream.facts.context)
        body, watch = watch_for(body, shape, upstream.engine.name, may_ask=may_ask)
        drop = _NO_ENCODING if shape.stream else _NOTHING
        added = own_answers.admitted_headers(given, self._wait, self._count_source)
        self._send(body, drop, added, watch)

    def _send(
        self, body: bytes, drop: frozenset[bytes] = _NOTHING, added: bytes = b"", watch: Watch | None = None
    ) -> None:
        request, upstream = self._request, self._upstream
        pool = upstream.pool
        left_out, lines = pool.access.towards
        head = request_head(
            request.method,
            pool.prefix + request.target,
            pool.authority,
            request.headers,
            body_bytes=len(body),
            peer=self._client.peer,
            known=request.known,
            drop=upstream.dropped | drop | left_out if drop or left_out else upstream.dropped,
        )
        if upstream.added_head or lines:
            head = head[:-2] + upstream.added_head + lines + b"\r\n"
        self._outgoing = head + body
        if len(self._pools) < 2:
            self._forget()
        if self._comments is not None and self._has_head:
            self._answer = late = LateAnswer(self, self._client, request, added=added, watch=watch)
            late.dialect = Dialect.OPENAI if self._route is None else self._route.dialect
        else:
            self._answer = Answer(self, self._client, request, added=added, watch=watch)
        connection = pool.take_idle()
        if connection is not None:
            self._transmit(connection)
        else:
            self._connect()

    def _connect(self) -> None:
        self._to(State.CONNECTING)
        self._task = self._gateway.loop.create_task(self._connect_to_engine())

    async def _connect_to_engine(self) -> None:
        try:
            try:
                connection = await self._upstream.pool.connect()
            except EngineUnavailable as error:
                # Nothing was sent, so the engine holds nothing, and another may have the request.
                if not self._move():
                    self._refuse_unavailable(str(error))
            else:
                self._transmit(connection)
        except Exception:
            self._give_up()
            raise

    def _transmit(self, connection: EngineConnection) -> None:
        self._to(State.SENDING)
        if self._shape is not None:
            self._forget()
        self._connection = connection
        connection.send(self._outgoing, self._answer, is_head=self._request.method == b"HEAD")

    def _forget(self) -> None:
        """It stays with this engine. A parsed body is not small; streams are many and long."""
        self._shape = self._ask = self._counted = None
        self._request.body = b""

    # --- from the answer

    def answer_begins(self) -> None:
        self._to(State.STREAMING)
        self._outgoing = b""

    def answer_whole(self, *, is_good: bool) -> None:
        self._connection = None
        self._upstream.pool.is_up = True
        self._end(Ending.COMPLETED if is_good else Ending.FAILED, usage=self._answer.usage)

    def answer_failed(self, why: str) -> None:
        connection, self._connection = self._connection, None
        assert connection is not None
        if self.state is State.STREAMING:
            self._end(Ending.FAILED, after=self._upstream.abort_grace, usage=self._answer.usage)
            self._answer.break_off(Reason.ENGINE_UNAVAILABLE, f"The engine broke off in its answer: {why}.")
            return
        is_stale = connection.requests > 1 and not connection.got_bytes
        age = self._gateway.loop.time() - connection.last_byte
        if is_stale and age < STALE_SECONDS and not self._is_retry:
            self._is_retry = True
            self._connect()
            return
        self._refuse_unavailable(why, after=self._upstream.abort_grace)

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
            self._refuse(own_answers.decline(self._gateway, Reason.DRAINING, message), after=after)

    def _leave_engine(self) -> float:
        """Drop the connection, if there is one. Returns how long the engine may still hold memory."""
        connection, self._connection = self._connection, None
        if connection is None:
            return 0.0
        connection.abandon(self._answer)
        return self._upstream.abort_grace

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
