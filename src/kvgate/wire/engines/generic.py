"""An OpenAI-compatible engine of which nothing else is known: everything on the safe side."""

from __future__ import annotations

from kvgate.wire.engines import Engine
from kvgate.wire.engines.openai_routes import EMBEDDINGS, messages_route, openai_routes, responses_route

GENERIC = Engine(
    name="generic",
    abort_grace=5.0,
    idle_connection=2.0,
    routes={
        **openai_routes(None),
        b"/v1/responses": responses_route(),
        b"/v1/messages": messages_route(),
        b"/v1/embeddings": EMBEDDINGS,
    },
    stream_usage=False,
    capacity="the operator",
    unit="the operator",
    context="the operator",
    cap_rules="not known",
    when_full="is not known",
    cannot_know=("its sizes, its counting, its defaults, and how fast it lets go",),
)
