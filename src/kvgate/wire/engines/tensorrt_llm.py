"""TensorRT-LLM's OpenAI server (trtllm-serve). It clamps the cap to the rest of the context."""

from __future__ import annotations

from kvgate.wire.engines import Engine
from kvgate.wire.engines.openai_routes import openai_routes, responses_route

TENSORRT_LLM = Engine(
    name="tensorrt-llm",
    # A client that has left is looked for once a second.
    abort_grace=2.0,
    idle_connection=4.0,
    routes={**openai_routes(None), b"/v1/responses": responses_route()},
    capacity="the operator",
    unit="blocks of tokens_per_block, 32 unless set",
    context="the operator",
    cap_rules="clamps the cap to the rest of the context",
    when_full="makes requests wait (GUARANTEED_NO_EVICT, the default), or pauses running ones",
    cannot_know=(
        "the tokens of a prompt: it has no counting endpoint; give kvgate the tokenizer",
        "its block statistics, where somebody else reads /metrics, which empties it",
    ),
)
