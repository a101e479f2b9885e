"""vLLM's OpenAI server (V1). `POST /tokenize` renders and counts as generation does."""

from __future__ import annotations

import json
from typing import Any

from kvgate.wire.dialects.native import read_vllm_generate
from kvgate.wire.dialects.openai import read_chat_batch
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
from kvgate.wire.routes import Route

# The completions API's own default, and that of sampling parameters; chat has none.
DEFAULT_CAP = 16
# Fields of a batch of conversations that are not those of one.
_NOT_ONE = ("messages", "stream", "n")


def count_text(shape: RequestShape, text: str) -> CountCall:
    sent_on: dict[str, Any] = {
        name: shape.body.fields[name] for name in ("model", "add_special_tokens") if name in shape.body.fields
    }
    return CountCall("/tokenize", json.dumps({"prompt": text} | sent_on).encode(), read_number("count"))


def count_chat(shape: RequestShape, conversation: Conversation) -> CountCall | None:
    if shape.api is Api.MESSAGES:
        return CountCall("/v1/messages/count_tokens", as_sent(shape), read_number("input_tokens"))
    if shape.api not in (Api.CHAT, Api.POOLING):
        return None
    if shape.body.fields.get("messages") is conversation.messages:
        return CountCall("/tokenize", as_sent(shape), read_number("count"))
    fields = {k: v for k, v in shape.body.fields.items() if k not in _NOT_ONE}
    body = json.dumps(fields | {"messages": conversation.messages}).encode()
    return CountCall("/tokenize", body, read_number("count"))


VLLM = Engine(
    name="vllm",
    # Blocks are freed one or two engine steps after the disconnect is seen.
    abort_grace=1.0,
    idle_connection=4.0,
    routes={
        **openai_routes(DEFAULT_CAP),
        b"/v1/chat/completions/batch": Route(read_chat_batch),
        b"/v1/responses": responses_route(),
        b"/v1/messages": messages_route(),
        b"/inference/v1/generate": Route(read_vllm_generate, cap_name="sampling_params.max_tokens"),
        b"/v1/embeddings": EMBEDDINGS,
        b"/pooling": EMBEDDINGS,
        b"/classify": EMBEDDINGS,
        b"/score": SCORE,
        b"/v1/score": SCORE,
        b"/rerank": RERANK,
        b"/v1/rerank": RERANK,
        b"/v2/rerank": RERANK,
    },
    free_posts=frozenset(
        {
            b"/tokenize",
            b"/detokenize",
            b"/v1/messages/count_tokens",
            b"/v1/chat/completions/render",
            b"/v1/completions/render",
            b"/v1/responses/render",
            b"/v1/messages/render",
            b"/v1/chat/completions/derender",
            b"/v1/completions/derender",
        }
    ),
    count_text=count_text,
    count_chat=count_chat,
    counts_media=True,
    rank_header=b"x-data-parallel-rank",
    capacity="GET /metrics, vllm:cache_config_info: num_gpu_blocks / ranks - 1",
    unit="blocks of the label block_size",
    context="GET /v1/models: max_model_len",
    cap_rules=(
        "clamps prompt + cap to the context; a completion with no cap gets 16, a chat the rest of the context"
    ),
    when_full="preempts the newest request and computes it again later; its stream stalls",
    cannot_know=(
        "a cap from generation_config, or from vLLM's override of it, which can only be lower",
        "the responses that previous_response_id names",
        "which data-parallel rank a request goes to, unless the gate pins it",
        "how many sequences it runs at once (max-num-seqs): more of them wait inside it and hold nothing",
    ),
)
