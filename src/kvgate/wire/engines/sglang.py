"""SGLang. Counts texts exactly; a chat is bounded by the count of all its texts and an allowance.

It refuses a prompt and a cap that together are longer than the context, so a cap that was not set is
not written where it would reach to the end.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from kvgate.wire.dialects.ollama import read_ollama_chat, read_ollama_generate
from kvgate.wire.dialects.pooling import read_embeddings
from kvgate.wire.dialects.sglang import read_sglang_generate
from kvgate.wire.dialects.shape import Api, Conversation, RequestShape
from kvgate.wire.engines import CountCall, Engine, as_sent, read_number
from kvgate.wire.engines.openai_routes import (
    EMBEDDINGS,
    RERANK,
    SCORE,
    messages_route,
    openai_routes,
    responses_route,
)
from kvgate.wire.refusal import Dialect
from kvgate.wire.routes import Route

COMPLETIONS_DEFAULT_CAP = 16
OLLAMA_DEFAULT_CAP = 2048


def count_text(shape: RequestShape, text: str) -> CountCall:
    sent_on: dict[str, Any] = {
        name: shape.body.fields[name] for name in ("model",) if name in shape.body.fields
    }
    return CountCall("/tokenize", json.dumps({"prompt": text} | sent_on).encode(), read_number("count"))


def count_chat(shape: RequestShape, conversation: Conversation) -> CountCall | None:
    if shape.api is not Api.MESSAGES:
        return None
    return CountCall("/v1/messages/count_tokens", as_sent(shape), read_number("input_tokens"))


SGLANG = Engine(
    name="sglang",
    # A client that has left is looked for every 4 s where nothing is streamed, after 2 s in a stream.
    abort_grace=5.0,
    idle_connection=4.0,
    routes={
        **openai_routes(COMPLETIONS_DEFAULT_CAP),
        b"/v1/responses": responses_route(),
        b"/v1/messages": messages_route(),
        b"/generate": Route(read_sglang_generate, Dialect.SGLANG, "sampling_params.max_new_tokens"),
        b"/api/generate": Route(
            partial(read_ollama_generate, default_cap=OLLAMA_DEFAULT_CAP),
            Dialect.OLLAMA,
            "options.num_predict",
        ),
        b"/api/chat": Route(
            partial(read_ollama_chat, default_cap=OLLAMA_DEFAULT_CAP), Dialect.OLLAMA, "options.num_predict"
        ),
        b"/v1/embeddings": EMBEDDINGS,
        b"/encode": Route(partial(read_embeddings, names=("text", "input_ids")), Dialect.SGLANG),
        b"/classify": Route(partial(read_embeddings, names=("text", "input_ids", "input")), Dialect.SGLANG),
        b"/v1/classify": EMBEDDINGS,
        b"/v1/rerank": RERANK,
        b"/v1/score": SCORE,
    },
    free_posts=frozenset(
        {
            b"/tokenize",
            b"/v1/tokenize",
            b"/detokenize",
            b"/v1/detokenize",
            b"/v1/messages/count_tokens",
            b"/parse_function_call",
            b"/separate_reasoning",
        }
    ),
    count_text=count_text,
    count_chat=count_chat,
    rank_header=b"x-data-parallel-rank",
    capacity="GET /server_info: token_capacity of each rank",
    unit="pages of page_size tokens",
    context="GET /server_info: context_length, else GET /v1/models: max_model_len",
    cap_rules=(
        "refuses prompt + cap above the context, then clips to the pool without a word; a "
        "completion with no cap gets 16"
    ),
    when_full="retracts requests and computes them again; the last one that does not fit fails with 500",
    cannot_know=(
        "the tokens of a chat template: the tokenizer at the gateway makes chats exact",
        "the prefill that comes before the sequences of n above 1",
        "preferred sampling parameters of the server",
    ),
)
