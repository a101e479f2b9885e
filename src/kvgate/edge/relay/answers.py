"""Answers that the relay itself gives: refusals, and what it adds to the engine's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgate.core.records import Granted, Refused
from kvgate.edge.relay.heads import own_response
from kvgate.edge.relay.pool import Fetched
from kvgate.wire.refusal import PHRASE, render

if TYPE_CHECKING:
    from kvgate.edge.relay.client import Request


def admitted_headers(granted: Granted) -> bytes:
    """Header lines that tell the client what was reserved for it."""
    return b"x-kvgate-output-cap: %d\r\nx-kvgate-reserved-blocks: %d\r\nx-kvgate-wait-ms: %d\r\n" % (
        granted.output_cap,
        granted.blocks,
        granted.waited * 1000,
    )


def refusal(request: Request, refused: Refused, *, busy_status: int, param: str | None = None) -> bytes:
    """A refusal as a whole response."""
    status, headers, body = render(refused, busy_status=busy_status, param=param)
    return _whole(request, status, PHRASE[status], headers, body)


def engine_error(request: Request, answer: Fetched) -> bytes:
    """The engine's own error about a request, as the engine would have given it."""
    kind = next((v for n, v in answer.headers if n.lower() == b"content-type"), b"application/json")
    phrase = answer.phrase.decode("ascii", "replace")
    return _whole(request, answer.status, phrase, b"content-type: %s\r\n" % kind, answer.body)


def _whole(request: Request, status: int, phrase: str, headers: bytes, body: bytes) -> bytes:
    if request.method == b"HEAD":
        # An answer to HEAD has no body, whatever its length says.
        request.keep_alive, body = False, b""
    return own_response(status, phrase, headers, body, close=not request.keep_alive)
