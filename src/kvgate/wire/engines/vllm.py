"""vLLM's OpenAI server (V1). `POST /tokenize` renders and counts as generation does."""

from __future__ import annotations

import json

from kvgate.wire.dialects.openai import Shape
from kvgate.wire.engines import CountCall, Engine, per_prompt, read_number


def count_calls(shape: Shape) -> list[CountCall | int]:
    read = read_number("count")
    if shape.is_chat:
        return [CountCall("/tokenize", shape.body.text.encode("utf-8"), read)]
    sent_on = {n: shape.body.fields[n] for n in ("model", "add_special_tokens") if n in shape.body.fields}
    return per_prompt(
        shape, lambda prompt: CountCall("/tokenize", json.dumps({"prompt": prompt} | sent_on).encode(), read)
    )


VLLM = Engine(
    name="vllm",
    count_calls=count_calls,
    # The completions API's own default; chat has none.
    completions_default_cap=16,
    # Blocks are freed one or two engine steps after the disconnect is seen.
    abort_grace=1.0,
    idle_connection=4.0,
)
