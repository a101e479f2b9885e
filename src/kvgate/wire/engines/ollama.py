"""Ollama: a fixed number of slots with a whole context each, so every sequence costs a whole context.

It counts for nobody, drops the oldest messages of a prompt that is too long, and shifts the context
of an answer that is too long; none of that leaves the slot.
"""

from __future__ import annotations

from dataclasses import replace

from kvgate.wire.dialects.ollama import in_exact_letters, read_ollama_chat, read_ollama_generate
from kvgate.wire.dialects.pooling import read_embeddings
from kvgate.wire.engines import Engine
from kvgate.wire.engines.openai_routes import EMBEDDINGS, messages_route, openai_routes, responses_route
from kvgate.wire.refusal import Dialect
from kvgate.wire.routes import Route

_CAP_NAME = "options.num_predict"
_READ_AS_WRITTEN = {
    **openai_routes(None),
    b"/v1/responses": responses_route(),
    b"/v1/messages": messages_route(),
    b"/v1/embeddings": EMBEDDINGS,
    b"/api/generate": Route(read_ollama_generate, Dialect.OLLAMA, _CAP_NAME),
    b"/api/chat": Route(read_ollama_chat, Dialect.OLLAMA, _CAP_NAME),
    b"/api/embed": Route(read_embeddings, Dialect.OLLAMA),
}

OLLAMA = Engine(
    name="ollama",
    abort_grace=2.0,
    idle_connection=4.0,
    routes={
        path: replace(route, read=in_exact_letters(route.read)) for path, route in _READ_AS_WRITTEN.items()
    },
    free_posts=frozenset({b"/api/show"}),
    is_partitioned=True,
    capacity="slots: the operator, else 1",
    unit="slots of a whole context",
    context="GET /api/ps: context_length",
    cap_rules=("shifts the context of an answer that is too long, and drops the oldest messages of a prompt"),
    when_full="cannot happen: each slot owns its context; the oldest text is dropped",
    cannot_know=(
        "the tokens of a prompt",
        "when a request for another model, or another context, makes it load anew",
    ),
)
