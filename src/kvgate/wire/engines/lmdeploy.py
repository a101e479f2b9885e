"""LMDeploy's OpenAI server. `/v1/encode` counts texts; messages have their own counting endpoint."""

from __future__ import annotations

import json

from kvgate.wire.dialects.native import read_lmdeploy_generate
from kvgate.wire.dialects.shape import Api, Conversation, RequestShape
from kvgate.wire.engines import CountCall, Engine, as_sent, read_number
from kvgate.wire.engines.openai_routes import messages_route, openai_routes
from kvgate.wire.routes import Route


def count_text(shape: RequestShape, text: str) -> CountCall:
    body = json.dumps({"input": text, "do_preprocess": False, "add_bos": True}).encode()
    return CountCall("/v1/encode", body, read_number("length"))


def count_chat(shape: RequestShape, conversation: Conversation) -> CountCall | None:
    if shape.api is not Api.MESSAGES:
        return None
    return CountCall("/v1/messages/count_tokens", as_sent(shape), read_number("input_tokens"))


LMDEPLOY = Engine(
    name="lmdeploy",
    # Without a cap it runs to the end of the session.
    abort_grace=2.0,
    idle_connection=4.0,
    routes={
        **openai_routes(None),
        b"/v1/messages": messages_route(),
        b"/generate": Route(read_lmdeploy_generate),
    },
    free_posts=frozenset({b"/v1/encode", b"/v1/messages/count_tokens"}),
    count_text=count_text,
    count_chat=count_chat,
    capacity="the operator",
    unit="blocks of 64 tokens unless set",
    context="the operator",
    cap_rules="no check of prompt + cap: an answer ends where the session does",
    when_full="evicts a sequence and computes it again",
    cannot_know=("how many blocks it has: the operator says so",),
)
