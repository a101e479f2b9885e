"""Text Generation Inference. It reserves prompt and at most 1,024 new tokens itself, in turns."""

from __future__ import annotations

import json
from functools import partial

from kvgate.wire.dialects.native import read_tgi
from kvgate.wire.dialects.shape import Api, Conversation, RequestShape
from kvgate.wire.engines import CountCall, Engine, as_sent, read_length
from kvgate.wire.engines.openai_routes import openai_routes
from kvgate.wire.refusal import Dialect
from kvgate.wire.routes import Route

_CAP_NAME = "parameters.max_new_tokens"


def count_text(shape: RequestShape, text: str) -> CountCall:
    return CountCall("/tokenize", json.dumps({"inputs": text}).encode(), read_length())


def count_chat(shape: RequestShape, conversation: Conversation) -> CountCall | None:
    if shape.api is not Api.CHAT:
        return None
    return CountCall("/chat_tokenize", as_sent(shape), read_length("tokenize_response"))


TGI = Engine(
    name="tgi",
    abort_grace=1.5,
    idle_connection=4.0,
    routes={
        **openai_routes(None),
        b"/generate": Route(partial(read_tgi, stream=False), Dialect.TGI, _CAP_NAME),
        b"/generate_stream": Route(partial(read_tgi, stream=True), Dialect.TGI, _CAP_NAME),
        b"/": Route(read_tgi, Dialect.TGI, _CAP_NAME),
    },
    free_posts=frozenset({b"/tokenize", b"/chat_tokenize"}),
    count_text=count_text,
    count_chat=count_chat,
    capacity="GET /metrics: tgi_batch_max_total_tokens",
    unit="blocks of at most 256 tokens",
    context="GET /info: max_total_tokens",
    cap_rules="refuses prompt + cap above the context (422); reserves at most 1,024 new tokens at a time",
    when_full="makes requests wait; never takes blocks back from a running one",
    cannot_know=("its token budget, which only the metric tgi_batch_max_total_tokens tells",),
)
