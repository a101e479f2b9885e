"""Rows of endpoint tables that several engines share."""

from __future__ import annotations

from functools import partial

from kvgate.wire.dialects.anthropic import read_messages
from kvgate.wire.dialects.openai import read_chat, read_completion
from kvgate.wire.dialects.pooling import read_embeddings, read_rerank, read_score
from kvgate.wire.dialects.responses import read_responses
from kvgate.wire.refusal import Dialect
from kvgate.wire.routes import Route

EMBEDDINGS = Route(read_embeddings)
RERANK = Route(read_rerank)
SCORE = Route(read_score)


def openai_routes(completions_default: int | None) -> dict[bytes, Route]:
    """Chat and completions."""
    return {
        b"/v1/chat/completions": Route(read_chat, cap_name="max_completion_tokens or max_tokens"),
        b"/v1/completions": Route(partial(read_completion, default_cap=completions_default)),
    }


def responses_route() -> Route:
    """OpenAI's responses API."""
    return Route(read_responses, cap_name="max_output_tokens")


def messages_route(default_cap: int | None = None) -> Route:
    """Anthropic's messages API. `default_cap`: the engine's own, where it does not insist on one."""
    return Route(partial(read_messages, default_cap=default_cap), Dialect.ANTHROPIC)
