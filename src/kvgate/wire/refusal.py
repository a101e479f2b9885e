"""Refusals as HTTP: status, headers and an OpenAI-shaped body that teaches.

`Retry-After` is whole seconds from 1 to 60 and `retry-after-ms` the same moment: client SDKs
ignore or misread what lies outside (docs/refusals.md has the table).
"""

from __future__ import annotations

import json
import math
from typing import Any

from kvgate.core.records import Reason, Refused

STATUS = {
    Reason.KV_CAPACITY: 429,
    Reason.QUEUE_FULL: 429,
    Reason.QUEUE_TIMEOUT: 429,
    Reason.CONTEXT_LENGTH_EXCEEDED: 413,
    Reason.KV_CAPACITY_EXCEEDED: 413,
    Reason.INVALID_REQUEST: 400,
    Reason.BODY_TOO_LARGE: 413,
    Reason.UNPRICED_ENDPOINT: 403,
    Reason.ENGINE_UNAVAILABLE: 503,
    Reason.DRAINING: 503,
}
PHRASE = {
    400: "Bad Request",
    403: "Forbidden",
    413: "Content Too Large",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
    529: "Overloaded",
}
_TYPES = {400: "invalid_request_error", 403: "permission_error", 413: "invalid_request_error"}
_CAPACITY = frozenset({Reason.KV_CAPACITY, Reason.QUEUE_FULL, Reason.QUEUE_TIMEOUT})


def status_of(reason: Reason, busy_status: int = 429) -> int:
    """The HTTP status of a refusal; the operator may choose the one for a busy pool."""
    status = STATUS[reason]
    return busy_status if status == 429 else status


def message_of(refused: Refused) -> str:
    """One or two sentences: what was needed, what is there, and what would have been admitted."""
    if refused.detail:
        return refused.detail
    prompt, cap = refused.prompt_tokens, refused.output_cap
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
    needs = f"The request needs {refused.needed_tokens} tokens of KV cache: a prompt of {prompt} and {asked}."
    fits = refused.output_cap_that_fits
    if refused.reason is Reason.KV_CAPACITY_EXCEEDED:
        advice = (
            f" Set max_tokens to {fits} or less." if fits else " Shorten the prompt or send fewer choices."
        )
        return f"{needs} The engine never has more than {refused.usable_tokens} to give.{advice}"
    advice = f" With max_tokens of {fits} or less it would be admitted now." if fits else ""
    return f"{needs} {refused.free_tokens} of {refused.usable_tokens} are free.{advice}"


def render(refused: Refused, *, busy_status: int = 429, param: str | None = None) -> tuple[int, bytes, bytes]:
    """`(status, header lines, body)` of a refusal. Header lines end with CRLF each."""
    status = status_of(refused.reason, busy_status)
    error: dict[str, Any] = {
        "message": message_of(refused),
        "type": _TYPES.get(status, "rate_limit_error" if refused.reason in _CAPACITY else "server_error"),
        "param": param,
        "code": refused.reason.value,
    }
    headers = b"content-type: application/json\r\nx-kvgate-reason: %s\r\n" % refused.reason.value.encode()
    retry: int | None = None
    if refused.reason.is_busy:
        milliseconds = min(60_000, max(1_000, math.ceil((refused.retry_after or 1.0) * 1000)))
        retry = math.ceil(milliseconds / 1000)
        headers += b"retry-after: %d\r\nretry-after-ms: %d\r\n" % (retry, milliseconds)
    else:
        headers += b"x-should-retry: false\r\n"
    if refused.needed_tokens:
        error |= {
            "retry_after_seconds": retry,
            "needed_tokens": refused.needed_tokens,
            "free_tokens": refused.free_tokens,
            "usable_tokens": refused.usable_tokens,
            "output_cap": refused.output_cap,
            "output_cap_that_fits": refused.output_cap_that_fits,
        }
    body = json.dumps({"error": error, "retry_after_seconds": retry}, ensure_ascii=False).encode()
    return status, headers, body
