"""Admission in front of an ASGI application: START HERE for `kvgate.asgi`.

A request to a priced path is read whole, counted, and asked of the gate; then the application gets it
with the reserved cap written in, or the client gets the refusal that the gateway would send.

Promises: pure ASGI, so no message of an answer is held back, joined or copied, and a disconnect
reaches the application in whatever order middlewares stand; what was reserved is given back when the
answer is whole, or the application has ended, whichever comes first, and never depends on the
application noticing that its client has gone; several worker processes never give out the same pool.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from kvgate.core.records import ANYONE, Ask, CapRules, Ending, PoolFacts, Reason, Refused, Seconds, Tenant
from kvgate.edge import clock
from kvgate.edge.asgi import workers
from kvgate.edge.asgi.counting import Count, CountRefused, count_prompts
from kvgate.edge.asgi.messages import (
    BodyTooLarge,
    ClientGone,
    Headers,
    Receive,
    Replay,
    Send,
    Watched,
    read_body,
    respond,
    with_body,
)
from kvgate.edge.asgi.routes import FREE_METHODS, OwnRoute, Scope, generates, paths_of, plain, table
from kvgate.edge.asgi.workers import SeveralWorkers
from kvgate.edge.library.admission import Admission
from kvgate.edge.library.admitting import AsyncAdmitting
from kvgate.edge.library.bells import unless
from kvgate.edge.library.ticket import AdmissionRefused, Ticket
from kvgate.tokens import PromptCounter
from kvgate.wire.body import BadBody
from kvgate.wire.dialects.shape import RequestShape, enforce
from kvgate.wire.engines import Engine
from kvgate.wire.engines.known import ENGINES
from kvgate.wire.routes import Route
from kvgate.wire.sse import usage_at_end

App: TypeAlias = Callable[[Any, Receive, Send], Awaitable[None]]

BODY_BYTES_MAX = 128 * 1024 * 1024
# For an application that cannot serve now, with the spread that keeps its clients apart.
UNAVAILABLE_RETRY = 2.0


class AdmissionMiddleware:
    """Wraps an ASGI application; FastAPI: `app.add_middleware(AdmissionMiddleware, admission=...)`."""

    # For a path that is refused because it is not priced.
    way_out = "price the path with routes={...}, or let it through with allow_paths=[...]"

    def __init__(
        self,
        app: App,
        admission: Admission | PoolFacts,
        *,
        routes: Mapping[str, OwnRoute] | None = None,
        engine: str = "generic",
        count: Count | PromptCounter | None = None,
        max_wait: Seconds = 0.0,
        others: Literal["pass", "refuse"] = "pass",
        allow_paths: Iterable[str] = (),
        workers: int | Literal["divide", "refuse", "own_pool"] = "divide",
        tenant: Callable[[Scope], Tenant] | None = None,
        body_bytes_max: int = BODY_BYTES_MAX,
    ) -> None:
        """`admission`: the pool; an `Admission` may be shared with code of yours.

        `routes`: your own generating paths, each with the name of a dialect ("chat", "completion",
        "responses", "messages", "embeddings"), `kvgate.asgi.fields(...)`, or a function from body to
        shape. `engine`: whose OpenAI-compatible paths and rules the application serves. `count`: a
        `PromptCounter`, or a function from shape to the prompt tokens of each part (also async); with
        none, a bound that is never too low. `others`: whether paths that are not priced go through; with
        "pass" all but those that are known to generate (docs/asgi.md). `allow_paths` go through in any
        case. `workers`: what to do about several processes (docs/asgi.md).
        Raises `ValueError`.
        """
        if engine not in ENGINES:
            raise ValueError(f"no engine is named {engine!r}; there are {', '.join(ENGINES)}")
        self.app = app
        self.admission = Admission(admission) if isinstance(admission, PoolFacts) else admission
        self.engine: Engine = ENGINES[engine]
        self.max_wait = max_wait
        self._routes = table(self.engine.routes, routes or {})
        free = {plain(path.decode()) for path in self.engine.free_posts}
        self._allowed = free | {plain(path) for path in allow_paths}
        self._count_with = count
        self._refuses_others = others == "refuse"
        self._workers = workers
        self._tenant = tenant
        self._body_bytes_max = body_bytes_max
        self._is_settled = False
        self._why_not: str | None = None

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if not self._is_settled:
            self._settle_workers()
        kind = scope["type"]
        if kind == "lifespan" and self._why_not is not None:
            await receive()
            await send({"type": "lifespan.startup.failed", "message": self._why_not})
        elif kind == "http":
            await self._http(scope, receive, send)
        elif kind == "websocket" and not self._is_allowed(scope):
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self.app(scope, receive, send)

    # --- what the request is

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        paths = paths_of(scope)
        if scope["method"] in FREE_METHODS:
            await self.app(scope, receive, send)
            return
        route = next((self._routes[path] for path in paths if path in self._routes), None)
        if route is not None:
            await self._priced(scope, route, receive, send)
        elif self._is_allowed(scope):
            await self.app(scope, receive, send)
        else:
            detail = (
                f"{scope['method']} {scope['path'][:200]} is not priced here and might generate. "
                f"The operator can {self.way_out}."
            )
            await self._refuse(send, self._decline(Reason.UNPRICED_ENDPOINT, detail))

    def _is_allowed(self, scope: Scope) -> bool:
        paths = paths_of(scope)
        if any(path in self._allowed for path in paths):
            return True
        return not self._refuses_others and not any(generates(path) for path in paths)

    async def _priced(self, scope: Scope, route: Route, receive: Receive, send: Send) -> None:
        if self._why_not is not None:
            refused = self._decline(Reason.ENGINE_UNAVAILABLE, self._why_not)
            await self._refuse(send, refused, route)
            return
        try:
            raw = await read_body(receive, scope["headers"], self._body_bytes_max)
            shape = route.read(raw)
            del raw
            ask = self._ask(scope, shape, await self.count(scope, shape))
        except ClientGone:
            return
        except BodyTooLarge:
            detail = f"The body has more than {self._body_bytes_max} bytes."
            await self._refuse(send, self._decline(Reason.BODY_TOO_LARGE, detail), route)
        except BadBody as error:
            refused = self._decline(Reason.INVALID_REQUEST, str(error))
            await self._refuse(send, refused, route, error.param)
        except CountRefused as error:
            await respond(send, error.status, error.headers, error.body)
        else:
            await self._admit(scope, route, shape, ask, receive, send)

    # --- what it costs

    async def count(self, scope: Scope, shape: RequestShape) -> tuple[int, ...]:
        """Prompt tokens of each part: never too low."""
        return await count_prompts(shape, self._count_with, self.engine, self.admission.facts.context)

    def _ask(self, scope: Scope, shape: RequestShape, prompts: tuple[int, ...]) -> Ask:
        rules = self.admission.rules
        if rules.default is None and shape.default_cap is not None:
            rules = CapRules(shape.default_cap, rules.ceiling)
        tenant = ANYONE if self._tenant is None else self._tenant(scope)
        return Ask(prompts, shape.output_cap, shape.choices, rules, self.max_wait, clock.draw(), tenant)

    # --- from asking to giving back

    async def _admit(
        self, scope: Scope, route: Route, shape: RequestShape, ask: Ask, receive: Receive, send: Send
    ) -> None:
        replay = Replay(receive)
        admitting = self.admission.enter(ask)
        ending = Ending.FAILED
        try:
            try:
                ticket = await self._ticket(admitting, replay)
            except AdmissionRefused as error:
                await self._refuse(send, error.refused, route)
                return
            if ticket is None:
                return
            body = enforce(shape, ticket.output_cap) if shape.generates else shape.body.text.encode()
            is_stream, sequences = shape.stream, shape.sequences
            del shape, ask  # a parsed body is not small; streams are many and long
            replay.give(body)
            inner = with_body(scope, body, self.engine.drop_headers)
            del body
            watched = Watched(send, _admitted(ticket), lambda: finished(watched))

            def finished(answer: Watched) -> None:
                is_good = answer.status < 400
                if is_good and not is_stream and (usage := usage_at_end(answer.tail)) is not None:
                    ticket.generated = usage.new // sequences
                ticket.close(Ending.COMPLETED if is_good else Ending.FAILED, after=0.0)

            await self.app(inner, replay.receive, watched.send)
        except BaseException as error:
            if not isinstance(error, Exception):
                ending = Ending.CANCELLED
            raise
        finally:
            admitting.close(Ending.CANCELLED if replay.is_gone else ending)

    async def _ticket(self, admitting: AsyncAdmitting, replay: Replay) -> Ticket | None:
        """None where the client left the line."""
        ticket = admitting.begin()
        if ticket is None:

            async def wait() -> None:
                await admitting.seated()

            if await unless(replay.gone, wait):
                ticket = admitting.ticket
        return ticket

    # --- refusals

    def _decline(self, reason: Reason, detail: str) -> Refused:
        self.admission.count_refusal(reason)
        retry_after = UNAVAILABLE_RETRY * (1 + clock.draw()) if reason.is_busy else None
        return Refused(reason, retry_after=retry_after, detail=detail)

    async def _refuse(
        self, send: Send, refused: Refused, route: Route | None = None, param: str | None = None
    ) -> None:
        error = AdmissionRefused(refused, busy_status=self.admission.busy_status)
        if route is None:
            await respond(send, *error.rendered())
        else:
            await respond(send, *error.rendered(route.dialect, route.cap_name, param))

    # --- several processes

    def _settle_workers(self) -> None:
        """Once in each process, when it is asked to serve: not while the application is imported,
        which a supervisor may do before it forks."""
        self._is_settled = True
        if self._workers == "own_pool":
            return
        found = workers.find()
        number = self._workers if isinstance(self._workers, int) else found.declared or 1
        try:
            if self._workers == "refuse" and number > 1:
                raise SeveralWorkers(
                    f"{number} worker processes would each give out the pool. Run one, or divide the "
                    'pool between them with workers="divide"'
                )
            if found.supervisor is not None:
                workers.claim(found.supervisor, number)
            if number > 1:
                self.admission.resize(_divided(self.admission.facts, number))
        except SeveralWorkers as error:
            self._why_not = f"{error}."


def _admitted(ticket: Ticket) -> Headers:
    return [
        (b"x-kvgate-output-cap", b"%d" % ticket.output_cap),
        (b"x-kvgate-reserved-blocks", b"%d" % ticket.blocks),
        (b"x-kvgate-wait-ms", b"%d" % (ticket.waited * 1000)),
    ]


def _divided(facts: PoolFacts, number: int) -> PoolFacts:
    """One worker's share. Raises `SeveralWorkers` where it would be nothing."""
    blocks = facts.total_blocks // number
    seqs = None if facts.max_seqs is None else facts.max_seqs // number
    if blocks < 1 or seqs == 0:
        raise SeveralWorkers(f"a pool of {facts.total_blocks} blocks cannot be divided by {number} workers")
    return replace(facts, total_blocks=blocks, max_seqs=seqs)
