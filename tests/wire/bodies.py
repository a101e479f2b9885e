"""A body for every priced endpoint: the same prompt said in each API."""

from __future__ import annotations

import json
from typing import Any

from kvgate.wire.body import Path
from kvgate.wire.engines.known import ENGINES
from kvgate.wire.routes import Route

CHAT = {"model": "m", "messages": [{"role": "user", "content": "PROMPT"}]}
CAP = 50

# path -> (body without a cap, where its cap goes; None where nothing is generated)
BODIES: dict[str, tuple[dict[str, Any], Path | None]] = {
    "/v1/chat/completions": (CHAT, ("max_tokens",)),
    "/chat/completions": (CHAT, ("max_completion_tokens",)),
    "/v1/chat/completions/batch": (CHAT | {"messages": [CHAT["messages"]] * 2}, ("max_tokens",)),
    "/v1/completions": ({"model": "m", "prompt": "PROMPT"}, ("max_tokens",)),
    "/completions": ({"prompt": "PROMPT"}, ("n_predict",)),
    "/completion": ({"prompt": "PROMPT"}, ("n_predict",)),
    "/infill": ({"input_prefix": "PROMPT", "input_suffix": ""}, ("n_predict",)),
    "/v1/responses": ({"model": "m", "input": "PROMPT"}, ("max_output_tokens",)),
    "/responses": ({"model": "m", "input": "PROMPT"}, ("max_output_tokens",)),
    "/v1/messages": (CHAT, ("max_tokens",)),
    "/inference/v1/generate": ({"token_ids": [1, 2, 3]}, ("sampling_params", "max_tokens")),
    "/generate": (
        {"text": "PROMPT", "prompt": "PROMPT", "inputs": "PROMPT"},
        ("sampling_params", "max_new_tokens"),
    ),
    "/generate_stream": ({"inputs": "PROMPT"}, ("parameters", "max_new_tokens")),
    "/": ({"inputs": "PROMPT"}, ("parameters", "max_new_tokens")),
    "/api/generate": ({"model": "m", "prompt": "PROMPT"}, ("options", "num_predict")),
    "/api/chat": (CHAT, ("options", "num_predict")),
    "/v1/score": ({"queries": "PROMPT", "documents": ["a", "b"]}, None),
    "/score": ({"text_1": "PROMPT", "text_2": "b"}, None),
}
for _path in (
    "/v1/embeddings",
    "/embeddings",
    "/embedding",
    "/pooling",
    "/classify",
    "/v1/classify",
    "/encode",
):
    BODIES[_path] = ({"input": "PROMPT", "text": "PROMPT"}, None)
BODIES["/api/embed"] = ({"model": "m", "input": ["PROMPT"]}, None)
for _path in ("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking"):
    BODIES[_path] = ({"query": "PROMPT", "documents": ["a", {"text": "b"}]}, None)

# Where an engine has the path for an API of its own.
OTHER_CAPS: dict[tuple[str, str], Path] = {
    ("tgi", "/generate"): ("parameters", "max_new_tokens"),
    ("lmdeploy", "/generate"): ("max_tokens",),
    ("llamacpp", "/api/chat"): ("max_tokens",),
}


def endpoints() -> list[tuple[str, str, Route]]:
    """(engine, path, route) of every priced endpoint."""
    return [
        (name, path.decode(), route)
        for name, engine in ENGINES.items()
        for path, route in engine.routes.items()
    ]


def generating() -> list[tuple[str, str, Route]]:
    return [(e, p, r) for e, p, r in endpoints() if BODIES[p][1] is not None]


def cap_path(engine: str, path: str) -> Path | None:
    return OTHER_CAPS.get((engine, path), BODIES[path][1])


def with_value(body: dict[str, Any], path: Path | None, value: Any) -> dict[str, Any]:
    """A copy of `body` with `value` at `path`."""
    copy: dict[str, Any] = json.loads(json.dumps(body))
    if path is not None:
        at: Any = copy
        for step in path[:-1]:
            at = at.setdefault(step, {})
        at[path[-1]] = value
    return copy


def sample(engine: str, path: str, cap: Any = CAP) -> dict[str, Any]:
    return with_value(BODIES[path][0], cap_path(engine, path), cap)


def raw(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()
