"""Refusals as HTTP: status, headers, and a body that teaches in the shape that the client reads.

`Retry-After` is whole seconds from 1 to 60 and `retry-after-ms` the same moment: client SDKs
ignore or misread what lies outside (docs/refusals.md has the table).
"""

from __future__ import annotations

import enum
import json
import math
from typing import Any

from kvgate.core.records import Reason, Refused

STATUS = {
    Reason.KV_CAPACITY: 429,
    Reason.QUEUE_FULL: 429,
    Reason.QUEUE_TIMEOUT: 429,
    Reason.TENANT_LIMIT: 429,
    Reason.CONTEXT_LENGTH_EXCEEDED: 413,
    Reason.KV_CAPACITY_EXCEEDED: 413,
    Reason.INVALID_REQUEST: 400,
    Reason.BODY_TOO_LARGE: 413,
    Reason.UNPRICED_ENDPOINT: 403,
    Reason.MODEL_NOT_FOUND: 404,
    Reason.INVALID_API_KEY: 401,
    Reason.ENGINE_UNAVAILABLE: 503,
    Reason.DRAINING: 503,
}
PHRASE = {
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    413: "Content Too Large",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
    529: "Overloaded",
}
_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    403: "permission_error",
    404: "invalid_request_error",
    413: "invalid_request_error",
}
_CAPACITY = frozenset({reason for reason, status in STATUS.items() if status == 429})
# The names that OpenAI's clients know. Tokens of KV cache, not of traffic; the last is this client's slot.
_RATE_LIMIT = (
    b"x-ratelimit-limit-tokens: %d\r\nx-ratelimit-remaining-tokens: %d\r\nx-ratelimit-reset-tokens: %dms\r\n"
)


class Dialect(enum.StrEnum):
    """Whose error shape a client reads."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    LLAMACPP = "llamacpp"
    SGLANG = "sglang"
    TGI = "tgi"
    OLLAMA = "ollama"


_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
_LLAMACPP_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    403: "permission_error",
    404: "not_found_error",
    413: "exceed_context_size_error",
}
_TGI_TYPES = {400: "validation", 401: "validation", 403: "validation", 404: "validation", 413: "validation"}


def status_of(reason: Reason, busy_status: int = 429) -> int:
    """The HTTP status of a refusal; the operator may choose the one for a busy pool."""
    status = STATUS[reason]
    return busy_status if status == 429 else status


def message_of(refused: Refused, cap_name: str = "max_tokens") -> str:
    """One or two sentences: what was needed, what is there, and what would have been admitted.

    `cap_name`: the field for the output cap in the client's API.
    """
    if refused.detail:
        return refused.detail
    prompt, cap = f"{'at least ' if refused.is_least else ''}{refused.prompt_tokens}", refused.output_cap
    if refused.reason is Reason.CONTEXT_LENGTH_EXCEEDED:
        return (
            f"The prompt has {prompt} tokens and the context is {refused.context}: no token of output "
            "would fit. Shorten the prompt."
        )
    asked = (
        f"an output cap of {cap}"
        if refused.output_cap_was_set
        else f"an unset output cap, which may grow to {cap} tokens"
    )
    needed = f"{'at least ' if refused.is_least else ''}{refused.needed_tokens}"
    needs = f"The request needs {needed} tokens of KV cache: a prompt of {prompt} and {asked}."
    fits = refused.output_cap_that_fits
    if refused.reason is Reason.KV_CAPACITY_EXCEEDED:
        advice = (
            f" Set {cap_name} to {fits} or less." if fits else " Shorten the prompt or send fewer choices."
        )
        return f"{needs} The engine never has more than {refused.usable_tokens} to give.{advice}"
    advice = f" With {cap_name} of {fits} or less it would be admitted now." if fits else ""
    return f"{needs} {refused.free_tokens} of {refused.usable_tokens} are free.{advice}"


def render(
    refused: Refused,
    *,
    dialect: Dialect | str = Dialect.OPENAI,
    busy_status: int = 429,
    param: str | None = None,
    cap_name: str = "max_tokens",
) -> tuple[int, bytes, bytes]:
    """`(status, header lines, body)` of a refusal. Header lines end with CRLF each.

    The facts are the same in every dialect; where its error is a mere string they stand beside it.
    """
    status = status_of(refused.reason, busy_status)
    headers = b"content-type: application/json\r\nx-kvgate-reason: %s\r\n" % refused.reason.value.encode()
    retry: int | None = None
    if refused.reason.is_busy:
        milliseconds = min(60_000, max(1_000, math.ceil((refused.retry_after or 1.0) * 1000)))
        retry = math.ceil(milliseconds / 1000)
        headers += b"retry-after: %d\r\nretry-after-ms: %d\r\n" % (retry, milliseconds)
        if refused.usable_tokens and refused.reason in _CAPACITY:
            headers += _RATE_LIMIT % (refused.usable_tokens, refused.free_tokens, milliseconds)
    else:
        headers += b"x-should-retry: false\r\n"
        if status == 401:
            headers += b"www-authenticate: Bearer\r\n"
    facts: dict[str, Any] = {"param": param, "code": refused.reason.value}
    if refused.needed_tokens:
        facts |= {
            "retry_after_seconds": retry,
            "needed_tokens": refused.needed_tokens,
            "free_tokens": refused.free_tokens,
            "usable_tokens": refused.usable_tokens,
            "output_cap": refused.output_cap,
            "output_cap_that_fits": refused.output_cap_that_fits,
        }
    shown = _in_shape(Dialect(dialect), status, refused, message_of(refused, cap_name), facts)
    shown["retry_after_seconds"] = retry
    return status, headers, json.dumps(shown, ensure_ascii=False).encode("utf-8", "replace")


def _in_shape(
    dialect: Dialect, status: int, refused: Refused, message: str, facts: dict[str, Any]
) -> dict[str, Any]:
    is_capacity = refused.reason in _CAPACITY
    kind = _TYPES.get(status, "rate_limit_error" if is_capacity else "server_error")
    match dialect:
        case Dialect.ANTHROPIC:
            kind = _ANTHROPIC_TYPES.get(status, "api_error")
            return {"type": "error", "error": {"type": kind, "message": message, **facts}}
        case Dialect.LLAMACPP:
            # The native endpoints give the status as `code`; the word is told as the reason.
            kind = _LLAMACPP_TYPES.get(status, "unavailable_error")
            error = {"code": status, "message": message, "type": kind, "reason": facts.pop("code"), **facts}
            return {"error": error}
        case Dialect.TGI:
            kind = _TGI_TYPES.get(status, "overloaded" if is_capacity else "unhealthy")
            return {"error": message, "error_type": kind, **facts}
        case Dialect.OLLAMA:
            return {"error": message, **facts}
        case _:
            return {"error": {"message": message, "type": kind, **facts}}


def stream_error(
    message: str, code: str, *, dialect: Dialect | str = Dialect.OPENAI, lines: bool = False
) -> bytes:
    """An error as the last event of an answer that has begun. `lines`: one JSON object a line."""
    shown: dict[str, Any]
    match Dialect(dialect):
        case Dialect.ANTHROPIC:
            shown = {"type": "error", "error": {"type": "api_error", "message": message, "code": code}}
        case Dialect.TGI:
            shown = {"error": message, "error_type": "generation", "code": code}
        case Dialect.OLLAMA:
            shown = {"error": message, "code": code}
        case _:
            shown = {"error": {"message": message, "type": "server_error", "param": None, "code": code}}
    written = json.dumps(shown, ensure_ascii=False).encode("utf-8", "replace")
    if lines:
        return written + b"\n"
    event = b"event: error\n" if dialect == Dialect.ANTHROPIC else b""
    return event + b"data: " + written + b"\n\n"
