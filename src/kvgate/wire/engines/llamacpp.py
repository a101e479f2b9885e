"""llama.cpp's server.

With its unified cache, one overflow ends every running stream, so the price must never be low.
The generation of a request with `X-Conversation-Id` outlives its client; that header is dropped.
"""

from __future__ import annotations

import json
from functools import partial

from kvgate.wire.dialects.native import read_llamacpp_completion, read_llamacpp_infill
from kvgate.wire.dialects.openai import read_completion
from kvgate.wire.dialects.pooling import read_embeddings
from kvgate.wire.dialects.shape import Api, Conversation, RequestShape
from kvgate.wire.engines import CountCall, Engine, as_sent, read_length, read_number
from kvgate.wire.engines.openai_routes import RERANK, messages_route, openai_routes, responses_route
from kvgate.wire.refusal import Dialect
from kvgate.wire.routes import Route

# The cap of a messages request that sets none.
MESSAGES_DEFAULT_CAP = 4096
_COUNTING = {
    Api.CHAT: "/v1/chat/completions/input_tokens",
    Api.RESPONSES: "/v1/responses/input_tokens",
    Api.MESSAGES: "/v1/messages/count_tokens",
}
_CHAT = openai_routes(None)[b"/v1/chat/completions"]
_COMPLETION = Route(read_llamacpp_completion, Dialect.LLAMACPP, "n_predict")
_EMBEDDINGS = Route(partial(read_embeddings, names=("input", "content")))


def count_text(shape: RequestShape, text: str) -> CountCall:
    body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
    return CountCall("/tokenize", body, read_length("tokens"))


def count_chat(shape: RequestShape, conversation: Conversation) -> CountCall | None:
    path = _COUNTING.get(shape.api)
    return None if path is None else CountCall(path, as_sent(shape), read_number("input_tokens"))


LLAMACPP = Engine(
    name="llamacpp",
    # A closed connection is seen by polling once a second, then at the next step.
    abort_grace=1.5,
    idle_connection=2.0,
    routes={
        b"/v1/chat/completions": _CHAT,
        b"/chat/completions": _CHAT,
        # Ollama's path, but OpenAI's body.
        b"/api/chat": _CHAT,
        b"/v1/completions": Route(partial(read_completion, mixed=True)),
        b"/completion": _COMPLETION,
        b"/completions": _COMPLETION,
        b"/infill": Route(read_llamacpp_infill, Dialect.LLAMACPP, "n_predict"),
        b"/v1/responses": responses_route(),
        b"/responses": responses_route(),
        b"/v1/messages": messages_route(MESSAGES_DEFAULT_CAP),
        b"/v1/embeddings": _EMBEDDINGS,
        b"/embeddings": _EMBEDDINGS,
        b"/embedding": _EMBEDDINGS,
        b"/v1/rerank": RERANK,
        b"/v1/reranking": RERANK,
        b"/rerank": RERANK,
        b"/reranking": RERANK,
    },
    free_posts=frozenset(
        {
            b"/tokenize",
            b"/detokenize",
            b"/apply-template",
            b"/v1/chat/completions/input_tokens",
            b"/chat/completions/input_tokens",
            b"/v1/responses/input_tokens",
            b"/responses/input_tokens",
            b"/v1/messages/count_tokens",
        }
    ),
    count_text=count_text,
    count_chat=count_chat,
    counts_media=True,
    drop_headers=frozenset({b"x-conversation-id"}),
    capacity="a bound, GET /props: one slot's n_ctx; whole: the operator's -c",
    unit="cells of one token, and slots",
    context="GET /props: default_generation_settings.n_ctx",
    cap_rules=(
        "no check of prompt + cap: an answer ends where its slot does; no cap means the rest of the slot"
    ),
    when_full="with the unified cache, every running stream ends with an error",
    cannot_know=(
        "the size of the pool and whether it is unified",
        "a global limit on predicted tokens (-n), which can only be lower",
    ),
)
