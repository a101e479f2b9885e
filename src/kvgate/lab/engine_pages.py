"""What the scripted engine answers to everything but generations: the pages by which gateways and
routers find out what runs there, and the counting calls of llama.cpp and of vLLM.

Promise: pages only; no I/O. Sizes are those that the engine was started with.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

MODEL = "scripted"
COUNTING = (
    "/v1/chat/completions/input_tokens",
    "/v1/responses/input_tokens",
    "/v1/messages/count_tokens",
    "/tokenize",
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The KV cache that the engine says it has. `total_blocks` 0: it does not run out."""

    total_blocks: int = 0
    block_size: int = 1
    context: int = 4096


def page(path: str, sizes: Sizes) -> bytes | None:
    """The answer to a GET; None where there is no such page."""
    if path in ("/health", "/healthz", "/ping", "/health_generate"):
        return b'{"status":"ok"}'
    shown = _pages(path, sizes)
    return None if shown is None else json.dumps(shown).encode()


def _pages(path: str, sizes: Sizes) -> dict[str, Any] | None:
    if path in ("/v1/models", "/models"):
        model = {"id": MODEL, "object": "model", "created": 1, "owned_by": "kvgate"}
        return {"object": "list", "data": [{**model, "max_model_len": sizes.context}]}
    if path == "/version":
        return {"version": "0.32.0"}
    if path == "/props":  # llama.cpp
        return {"default_generation_settings": {"n_ctx": sizes.context}, "total_slots": 64}
    if path in ("/get_model_info", "/model_info"):  # SGLang
        return {"model_path": MODEL, "tokenizer_path": MODEL, "is_generation": True}
    if path in ("/get_server_info", "/server_info"):
        shown = {"model_path": MODEL, "served_model_name": MODEL, "tp_size": 1, "dp_size": 1}
        cache = {"max_total_num_tokens": sizes.total_blocks * sizes.block_size}
        return {**shown, **cache, "context_length": sizes.context, "version": "0.5.0"}
    return None


def count(body: Any, path: str) -> int:
    """Roughly a quarter of the characters, but at least 1: cheap, and the same every time."""
    if "messages" not in body:
        text = next((body[name] for name in ("content", "prompt", "input") if name in body), "")
        return len(text) if isinstance(text, list) else max(1, len(text) // 4)
    contents = [m.get("content") or "" for m in body.get("messages", [])]
    return max(1, sum(len(c) if isinstance(c, str) else len(json.dumps(c)) for c in contents) // 4)


def count_page(body: Any, path: str, tokens: int, sizes: Sizes) -> bytes:
    """The answer to a counting call, in the dialect that the call is in."""
    if path != "/tokenize":  # llama.cpp, a chat
        return b'{"input_tokens":%d}' % tokens
    ids = list(range(tokens))
    if "content" in body:  # llama.cpp, a text
        return json.dumps({"tokens": ids}).encode()
    return json.dumps({"count": tokens, "max_model_len": sizes.context, "tokens": ids}).encode()
