"""Which requests of an application are priced, and how their bodies are read.

Promises: what a router may take for the same path (a doubled or trailing slash, a mount point) is the
same path here, so none is passed on unpriced by its spelling. Servers unescape paths before. A path
under which any engine or public API generates is known as such, also below a prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from kvgate.wire.body import Body
from kvgate.wire.dialects.chats import conversation_of, messages_of
from kvgate.wire.dialects.fields import cap_of, choices_of, flag
from kvgate.wire.dialects.openai import prompt_parts
from kvgate.wire.dialects.shape import Api, CapPlace, Part, RequestShape, StreamKind
from kvgate.wire.engines.generic import GENERIC
from kvgate.wire.engines.known import ENGINES
from kvgate.wire.refusal import Dialect
from kvgate.wire.routes import Route

Scope: TypeAlias = Mapping[str, Any]
OwnRoute: TypeAlias = "str | Route | Callable[[bytes], RequestShape]"

# Names for the readers that kvgate brings, for paths of one's own.
DIALECTS = {
    "chat": GENERIC.routes[b"/v1/chat/completions"],
    "completion": GENERIC.routes[b"/v1/completions"],
    "responses": GENERIC.routes[b"/v1/responses"],
    "messages": GENERIC.routes[b"/v1/messages"],
    "embeddings": GENERIC.routes[b"/v1/embeddings"],
}
# Requests without a body that generates: they are never priced.
FREE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

# Of the public APIs: they generate, and nothing here prices them.
_UNPRICED = (
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/images/edits",
    "/v1/images/generations",
    "/v1/images/variations",
    "/v1/messages/batches",
    "/v1/complete",
    "/v1/realtime",
    "/invocations",
)


def fields(
    prompt: str = "prompt",
    max_tokens: str = "max_tokens",
    *,
    n: str | None = None,
    default: int | None = None,
    dialect: Dialect = Dialect.OPENAI,
) -> Route:
    """The route of an endpoint whose JSON body names these fields.

    `prompt`: a text, token ids, a list of either, or chat messages. `max_tokens`: the output cap; the
    reserved cap is written there. `n`: sequences a prompt. `default`: what your server generates at
    most where no cap is set (None: the rest of the context).
    """

    def read(raw: bytes) -> RequestShape:
        body = Body(raw)
        value = body.fields.get(prompt)
        is_chat = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
        parts: tuple[Part, ...]
        if is_chat:
            parts = (conversation_of(messages_of(value, prompt), body.fields),)
        else:
            parts = prompt_parts(value, prompt)
        cap = cap_of(body.fields, max_tokens)
        stream = flag(body.fields, "stream")
        return RequestShape(
            body,
            is_chat=is_chat,
            prompts=tuple(part for part in parts if isinstance(part, str | list)),
            output_cap=cap,
            choices=1 if n is None else choices_of(body.fields, n),
            stream=stream,
            api=Api.CHAT if is_chat else Api.COMPLETION,
            parts=parts,
            default_cap=default,
            cap_places=(CapPlace((max_tokens,), cap),),
            stream_kind=StreamKind.SSE if stream else StreamKind.NONE,
        )

    return Route(read, dialect, max_tokens)


def table(engine: Mapping[bytes, Route], own: Mapping[str, OwnRoute]) -> dict[str, Route]:
    """Priced paths: those of the engine, and one's own. Raises `ValueError` for an unknown name."""
    routes = {plain(path.decode()): route for path, route in engine.items()}
    for path, given in own.items():
        if isinstance(given, str):
            if given not in DIALECTS:
                names = ", ".join(DIALECTS)
                raise ValueError(f"{path}: no dialect is named {given!r}; there are {names}")
            given = DIALECTS[given]
        routes[plain(path)] = given if isinstance(given, Route) else Route(given)
    return routes


def generates(path: str) -> bool:
    """Whether a path, in its `plain` spelling, is known to generate, in whatever application.

    Paths with a version are known below any prefix too: `/llm/v1/chat/completions`.
    """
    tail = path[path.rfind("/v1/") :] if "/v1/" in path else path
    return path in _GENERATING or tail in _GENERATING


def paths_of(scope: Scope) -> tuple[str, ...]:
    """The spellings under which a request's path may be known, its mount point on or off."""
    path, root = scope["path"], scope.get("root_path", "")
    if root and path.startswith(root):
        return plain(path), plain(path[len(root) :])
    return (plain(path),)


def plain(path: str) -> str:
    """One spelling for all that routers may take for the same path."""
    return "/" + "/".join(part for part in path.split("/") if part)


_GENERATING = frozenset(
    (*_UNPRICED, *(plain(path.decode()) for engine in ENGINES.values() for path in engine.routes))
)
