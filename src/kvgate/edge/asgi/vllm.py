"""Admission inside vLLM's own API server: `vllm serve MODEL --middleware kvgate.vllm.Middleware`.

Sizes come from the server's state, counts from its own counting endpoints (called in this process, so
with its renderer, template and tokenizer), settings from the environment (docs/fronts.md).

Promises: nothing of vLLM is imported, only read; a request without a valid key costs nothing, though
this runs before vLLM's own check; where a request's memory cannot be told, the server does not start,
and says why; with several API servers each has its share. vLLM's Rust front end runs no Python
middleware.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import secrets
from collections.abc import Mapping
from typing import Any, TypeAlias

from kvgate.core.records import CapRules, PoolFacts
from kvgate.edge.asgi.counting import CountRefused
from kvgate.edge.asgi.messages import Headers, Message, Receive, Send, respond
from kvgate.edge.asgi.middleware import AdmissionMiddleware, App
from kvgate.edge.asgi.routes import Scope
from kvgate.edge.asgi.vllm_sizes import UnknownPool, pool_of
from kvgate.edge.library.admission import Admission
from kvgate.wire.dialects.shape import RequestShape, whole_context
from kvgate.wire.engines import CountCall, NoCount
from kvgate.wire.engines.vllm import VLLM

State: TypeAlias = Any
"""`app.state` of vLLM's API server."""

LOG = logging.getLogger("kvgate")
# Nothing is ever reserved of it.
_UNKNOWN = PoolFacts(total_blocks=1, block_size=1, context=1, safety_fraction=1.0)
# What vLLM's own check guards; all else needs no key there either.
GUARDED = ("/v1", "/v2", "/inference", "/cohere")


class Middleware:
    """The class to name after `--middleware`. One for each API server process."""

    def __init__(self, app: App) -> None:
        """Raises `ValueError` for a setting that cannot be read."""
        self.app = app
        self._settings = Settings(os.environ)
        self._inner: _Priced | None = None

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        state = scope["app"].state
        if self._inner is None and (scope["type"] != "lifespan" or hasattr(state, "vllm_config")):
            self._inner = _Priced(self.app, state, self._settings)
        inner = self._inner
        if inner is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http" and not _has_key(scope, inner.keys):
            await respond(send, 401, [(b"content-type", b"application/json")], b'{"error":"Unauthorized"}')
        else:
            await inner(scope, receive, send)


class Settings:
    """What the environment says. Raises `ValueError` naming the variable that cannot be read."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        def number(name: str, default: float | None) -> float | None:
            text = environ.get(name)
            try:
                return default if not text else float(text)
            except ValueError:
                raise ValueError(f"{name} must be a number, got {text!r}") from None

        def whole(name: str) -> int | None:
            found = number(name, None)
            return None if found is None else int(found)

        self.safety_fraction = number("KVGATE_SAFETY_FRACTION", 0.9) or 0.9
        self.max_wait = number("KVGATE_MAX_WAIT", 0.0) or 0.0
        self.abort_grace = number("KVGATE_ABORT_GRACE", VLLM.abort_grace) or 0.0
        self.busy_status = whole("KVGATE_BUSY_STATUS") or 429
        self.rules = CapRules(whole("KVGATE_DEFAULT_OUTPUT_CAP"), whole("KVGATE_MAX_OUTPUT_CAP"))
        self.allow_paths = environ.get("KVGATE_ALLOW_PATH", "").split()


class _Priced(AdmissionMiddleware):
    """The middleware for one server, once its state is known.

    Where the pool is unknown the server does not start. One that starts its application otherwise
    gets 503 for all that might generate; its health and its lists stay what they are.
    """

    way_out = "let the path through with KVGATE_ALLOW_PATH"

    def __init__(self, app: App, state: State, settings: Settings) -> None:
        facts, why_not = _UNKNOWN, None
        try:
            facts, findings = pool_of(state.vllm_config, settings.safety_fraction)
            for finding in findings:
                LOG.warning("%s: %s", finding.what, finding.fix)
        except UnknownPool as error:
            why_not = f"{error}."
        except AttributeError as error:
            why_not = f"This server's state is not that of a vLLM that kvgate knows: {error}."
        if why_not is not None:
            LOG.error("%s", why_not)
        admission = Admission(
            facts,
            rules=settings.rules,
            abort_grace=settings.abort_grace,
            busy_status=settings.busy_status,
        )
        super().__init__(
            app,
            admission,
            engine="vllm",
            max_wait=settings.max_wait,
            others="refuse",
            allow_paths=settings.allow_paths,
            workers="own_pool" if why_not else api_servers(state),
        )
        self._why_not = why_not
        given = getattr(getattr(state, "args", None), "api_key", None) or [os.environ.get("VLLM_API_KEY", "")]
        self.keys = [hashlib.sha256(key.encode()).digest() for key in given if key]

    async def count(self, scope: Scope, shape: RequestShape) -> tuple[int, ...]:
        plan = VLLM.plan(shape)
        if plan.is_whole_context:
            return whole_context(shape, self.admission.facts.context, shape.effective_cap)
        counts = []
        for terms in plan.parts:
            counts.append(
                sum([term if isinstance(term, int) else await self._call(scope, term) for term in terms])
            )
        return tuple(counts)

    async def _call(self, scope: Scope, call: CountCall) -> int:
        status, headers, body = await ask_inside(self.app, scope, call.path, call.body)
        if status != 200:
            raise CountRefused(status, headers, body)
        try:
            return call.read(body)
        except NoCount as error:
            message = json.dumps({"error": {"message": f"kvgate got no count: {error}", "code": 500}})
            raise CountRefused(500, [(b"content-type", b"application/json")], message.encode()) from None


def api_servers(state: State) -> int:
    """API server processes in front of the same engine."""
    told = getattr(state.args, "api_server_count", None) or 1
    return max(int(told), int(getattr(state.vllm_config.parallel_config, "_api_process_count", 1) or 1))


def _has_key(scope: Scope, keys: list[bytes]) -> bool:
    """As vLLM's own check, which stands behind this one."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    if not keys or scope.get("method") == "OPTIONS" or not path.startswith(GUARDED):
        return True
    given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, key = given.partition(b" ")
    digest = hashlib.sha256(key).digest()
    is_right = False
    for known in keys:  # all of them, so that the time says nothing
        is_right |= secrets.compare_digest(digest, known)
    return is_right and scheme.lower() == b"bearer"


async def ask_inside(app: App, scope: Scope, path: str, body: bytes) -> tuple[int, Headers, bytes]:
    """A POST to the application itself, with the request's own credentials: status, headers, body."""
    status, fields, pieces = 500, Headers(), list[bytes]()
    sent = False
    headers = [field for field in scope["headers"] if field[0] in (b"authorization", b"host")]
    headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    target = scope.get("root_path", "") + path
    inner = {**scope, "method": "POST", "path": target, "raw_path": target.encode(), "query_string": b""}
    inner |= {"headers": headers, "extensions": {}}

    async def receive() -> Message:
        nonlocal sent
        if sent:
            # The application listens for a disconnect meanwhile; its task ends with the answer.
            await asyncio.Event().wait()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, fields
        if message["type"] == "http.response.start":
            status, fields = message["status"], list(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            pieces.append(message.get("body", b""))

    await app(inner, receive, send)
    return status, [field for field in fields if field[0] != b"content-length"], b"".join(pieces)
