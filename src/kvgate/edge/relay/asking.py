"""A request from its bytes to its place in a pool: what it asks for, what that costs, who may have it.

Promises: nothing is sent before the gate has said yes, except on paths that cannot generate; between
the gate's yes and the request's hold on the reservation there is no await. A request that has been
granted goes on in `exchange.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvgate.core.records import Ask, Ending, Granted, Reason, Refused
from kvgate.edge import clock
from kvgate.edge.counting.counted import Counted, CountRefused, Outcome
from kvgate.edge.identity import in_full
from kvgate.edge.relay import own_answers
from kvgate.edge.relay.comments import Comments
from kvgate.edge.relay.host import Host
from kvgate.edge.relay.moving import Moving
from kvgate.edge.relay.request import Request
from kvgate.edge.relay.state import State
from kvgate.edge.relay.uncounted import LOOK_FROM
from kvgate.edge.upstreams import models
from kvgate.edge.upstreams.routing import NotServed, first_up
from kvgate.wire.body import BadBody
from kvgate.wire.dialects.openai import Shape
from kvgate.wire.dialects.shape import StreamKind
from kvgate.wire.routes import FREE_METHODS, Route, unpriced_message

if TYPE_CHECKING:
    from kvgate.edge.relay.client import ClientConnection


NO_KEY = "The API key of this request is not one that this gateway lets in."


class Asking(Moving):
    """A request up to the grant, or to its refusal."""

    __slots__ = ("_comments", "_route", "_task")

    def __init__(self, gateway: Host, client: ClientConnection, request: Request) -> None:
        super().__init__(gateway)
        self._client = client
        self._request = request
        self._line_key = None
        self._waits_since = 0.0
        self._route: Route | None = None
        self._shape = None
        self._counted = None
        self._ask = None
        self._comments: Comments | None = None
        self._pools = ()  # that it may still go to
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Decide what the request is; price it, pass it on, or refuse it."""
        request, gateway = self._request, self._gateway
        gateway.requests += 1
        path = request.target.partition(b"?")[0]
        if gateway.is_draining:
            self._refuse(own_answers.decline(gateway, Reason.DRAINING, "The gateway is shutting down."))
            return
        if not gateway.may_enter(request.headers):
            self._refuse(own_answers.decline(gateway, Reason.INVALID_API_KEY, NO_KEY))
            return
        is_allowed = path in gateway.allow_paths
        self._route = route = None if is_allowed else gateway.fleet.route_for(request.method, path)
        try:
            if route is None:
                self._pass_on(path, is_allowed=is_allowed)
                return
            self._is_priced = True
            self._shape, self._route, self._pools = gateway.fleet.read(route, path, request.body)
        except BadBody as error:
            self._refuse(own_answers.decline(gateway, Reason.INVALID_REQUEST, str(error)), error.param)
        except NotServed as missing:
            self._refuse(own_answers.decline(gateway, missing.reason, str(missing)), "model")
        else:
            self._upstream = first_up(self._pools)
            if not self._upstream.is_sized:
                self._refuse_unavailable(self._upstream.unsized_why)
                return
            self._count(self._shape)

    def _pass_on(self, path: bytes, *, is_allowed: bool) -> None:
        request, gateway = self._request, self._gateway
        if path == models.PATH and request.method in FREE_METHODS:
            page = gateway.fleet.models_page()
            if page is not None:
                self._end(Ending.COMPLETED)
                self._reply(own_answers.page(request, page))
                return
        upstream = gateway.fleet.unpriced(request.method, path, request.body, is_allowed=is_allowed)
        if upstream is None:
            detail = unpriced_message(request.method, path)
            self._refuse(own_answers.decline(gateway, Reason.UNPRICED_ENDPOINT, detail))
            return
        self._upstream = upstream
        self._send(request.body)

    def _count(self, shape: Shape) -> None:
        if len(self._request.body) > LOOK_FROM and self._is_hopeless(shape):
            return
        found = self._upstream.counter.begin(
            shape, self._request.headers, self._client.peer, self._count_ends
        )
        if isinstance(found, Counted):
            self._ask_for_room(found)
            return
        self._counting = found
        if not self._goes_on_bound(shape, found) and self.state is not State.COUNTING:
            self._to(State.COUNTING)

    def _count_ends(self, outcome: Outcome) -> None:
        self._counting = None
        try:
            if self._bound is not None:
                # It has been let in. Where there is no count, it stays with what it has.
                if isinstance(outcome, Counted) and self._settle(outcome) and self._counted is not None:
                    self._counted = outcome
            elif isinstance(outcome, Counted):
                self._ask_for_room(outcome)
            elif isinstance(outcome, CountRefused):
                self._end(Ending.FAILED, outcome="engine_error")
                self._reply(own_answers.engine_error(self._request, outcome.answer))
            else:
                self._count_elsewhere(str(outcome))
        except Exception:
            self._give_up()
            raise

    def _ask_for_room(self, counted: Counted) -> None:
        shape = self._shape
        assert shape is not None
        self._to(State.COUNTED)
        self._counted = counted
        self._count_source = counted.source
        self._upstream, self._ask = self._gateway.choose(
            self._pools, shape, counted.prompts, self._request.headers
        )
        self._tenant = self._ask.tenant.name
        goes_to = self._goes_to if len(self._pools) > 1 else None
        self._line_key = self._upstream.keeper.ask(self._ask, self._answered, self._in_full, goes_to)
        if self._line_key is not None:
            self._to(State.WAITING)
            self._waits_since = clock.now()
            self._comment(shape, self._gateway.settings.waiting_comments)

    def _comment(self, shape: Shape, every: float) -> None:
        """Tell a client that reads events, now and then, that it is not forgotten."""
        if (
            every <= 0
            or not shape.stream
            or shape.stream_kind is StreamKind.NDJSON
            or not self._request.is_http11
        ):
            return
        if self._comments is None:
            self._comments = Comments(self._gateway.loop, self._client, self._request, every)
        self._comments.begin()

    def _in_full(self, ask: Ask) -> Ask:
        request = self._request
        return in_full(ask, request.headers, request.target, request.body)

    def _answered(self, given: Granted | Refused) -> None:
        self._line_key = None
        if self._comments is not None:
            self._comments.stop()
        if isinstance(given, Refused):
            self._refuse(given)
            return
        shape, ask = self._shape, self._ask
        assert shape is not None
        assert ask is not None
        self._hold(given, ask, is_counted=self._bound is None and not shape.priced_as_whole_context)
        try:
            self._granted(given, shape)
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """A defect of ours must not leave a client hanging or a reservation held."""
        self._withdraw()
        self._end(Ending.FAILED, after=self._leave_engine())
        self._client.break_off(is_visible=False)

    def _withdraw(self) -> None:
        """Stop what has not reached the engine yet."""
        if self._counting is not None:
            self._counting.cancel()
        if self.state is State.CONNECTING and self._task is not None:
            self._task.cancel()
            self._task = None
        if self._line_key is not None:
            self._upstream.keeper.leave(self._line_key)
            self._line_key = None
            if self._comments is not None:
                self._comments.stop()

    # --- what comes after

    def _granted(self, given: Granted, shape: Shape) -> None:
        raise NotImplementedError

    def _send(self, body: bytes) -> None:
        raise NotImplementedError

    def _leave_engine(self) -> float:
        raise NotImplementedError

    # --- endings

    def _refuse(self, refused: Refused, param: str | None = None, *, after: float = 0.0) -> None:
        self._end(Ending.FAILED, after=after, outcome=refused.reason.value)
        busy_status, route = self._gateway.settings.busy_status, self._route
        if self._has_head:
            self._reply(own_answers.refusal_event(refused, busy_status=busy_status, param=param, route=route))
            return
        answer = own_answers.refusal(
            self._request, refused, busy_status=busy_status, param=param, route=route
        )
        self._reply(answer)

    def _refuse_unavailable(self, why: str, *, after: float = 0.0) -> None:
        refused = own_answers.decline(
            self._gateway, Reason.ENGINE_UNAVAILABLE, f"The engine is not available: {why}."
        )
        self._refuse(refused, after=after)

    @property
    def _has_head(self) -> bool:
        """The client has had a head of ours, and a status that can no longer be changed."""
        return self._comments is not None and self._comments.has_head

    def _reply(self, response: bytes) -> None:
        self._client.write(response)
        self._client.finished(keep_alive=self._request.keep_alive)
