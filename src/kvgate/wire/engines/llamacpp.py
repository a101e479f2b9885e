"""llama.cpp's server.

With its unified cache, one overflow ends every running stream, so the price must never be low.
The generation of a request with `X-Conversation-Id` outlives its client; that header is dropped.
"""

from __future__ import annotations

import json

from kvgate.wire.dialects.openai import Shape
from kvgate.wire.engines import CountCall, Engine, NoCount, per_prompt, read_number


def _count_tokens(raw: bytes) -> int:
    try:
        tokens = json.loads(raw)["tokens"]
    except (ValueError, KeyError, TypeError):
        raise NoCount("no 'tokens' in the answer") from None
    if not isinstance(tokens, list):
        raise NoCount("'tokens' is not a list")
    return len(tokens)


def count_calls(shape: Shape) -> list[CountCall | int]:
    if shape.is_chat:
        path = "/v1/chat/completions/input_tokens"
        return [CountCall(path, shape.body.text.encode("utf-8"), read_number("input_tokens"))]
    return per_prompt(shape, _call_for)


def _call_for(prompt: str) -> CountCall:
    body = json.dumps({"content": prompt, "add_special": True, "parse_special": True}).encode()
    return CountCall("/tokenize", body, _count_tokens)


LLAMACPP = Engine(
    name="llamacpp",
    count_calls=count_calls,
    completions_default_cap=None,
    # A closed connection is seen by polling once a second, then at the next step.
    abort_grace=1.5,
    idle_connection=2.0,
    drop_headers=frozenset({b"x-conversation-id"}),
)
