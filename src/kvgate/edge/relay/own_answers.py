"""Answers that the relay itself gives: refusals, and what it adds to the engine's."""

from __future__ import annotations

from kvgate.core.records import Granted, Reason, Refused, Seconds
from kvgate.edge import clock
from kvgate.edge.relay.heads import own_response
from kvgate.edge.relay.host import Host
from kvgate.edge.relay.pool import Fetched
from kvgate.edge.relay.request import Request
from kvgate.wire.chunks import LAST_CHUNK, frame
from kvgate.wire.refusal import PHRASE, Dialect, render
from kvgate.wire.routes import Route
from kvgate.wire.sse import error_event

# Seconds; an engine that restarts takes longer, but its clients are spread by then.
UNAVAILABLE_RETRY = 2.0


def decline(gateway: Host, reason: Reason, detail: str) -> Refused:
    """A refusal that the gate was not asked about, counted like the others."""
    gateway.gate.refused(reason)
    retry_after = UNAVAILABLE_RETRY * (1 + clock.draw()) if reason.is_busy else None
    return Refused(reason, retry_after=retry_after, detail=detail)


_ADMITTED = (
    b"x-kvgate-output-cap: %d\r\nx-kvgate-reserved-blocks: %d\r\n"
    b"x-kvgate-wait-ms: %d\r\nx-kvgate-count-source: %s\r\n"
)


def admitted_headers(granted: Granted, waited: Seconds, count_source: str) -> bytes:
    """Header lines that tell the client what was reserved for it, how long it waited for that, in all the
    lines that it stood in, and where its count came from."""
    return _ADMITTED % (granted.output_cap, granted.blocks, waited * 1000, count_source.encode("ascii"))


def refusal(
    request: Request,
    refused: Refused,
    *,
    busy_status: int,
    param: str | None = None,
    route: Route | None = None,
) -> bytes:
    """A refusal as a whole response, in the shape of the API at `route`."""
    status, headers, body = render(
        refused,
        dialect=route.dialect if route else Dialect.OPENAI,
        busy_status=busy_status,
        param=param,
        cap_name=route.cap_name if route else "max_tokens",
    )
    return _whole(request, status, PHRASE[status], headers, body)


def refusal_event(
    refused: Refused, *, busy_status: int, param: str | None = None, route: Route | None = None
) -> bytes:
    """The same refusal, where the client has had the head of a stream: an error event, and the end."""
    dialect = route.dialect if route else Dialect.OPENAI
    cap_name = route.cap_name if route else "max_tokens"
    body = render(refused, dialect=dialect, busy_status=busy_status, param=param, cap_name=cap_name)[2]
    name = b"event: error\n" if dialect is Dialect.ANTHROPIC else b""
    return frame(name + error_event(body)) + LAST_CHUNK


def event_stream_head(request: Request) -> bytes:
    """A head of the gateway's own, for a stream of which nothing is known yet."""
    return _STREAM_HEAD + (b"\r\n" if request.keep_alive else b"connection: close\r\n\r\n")


_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"x-accel-buffering: no\r\ntransfer-encoding: chunked\r\n"
)


def error_in_answer(reason: Reason, message: str) -> bytes:
    """The error that ends an answer which has begun: the body of the refusal, in one line of JSON."""
    retry_after = UNAVAILABLE_RETRY * (1 + clock.draw())
    return render(Refused(reason, retry_after=retry_after, detail=message))[2]


def engine_error(request: Request, answer: Fetched) -> bytes:
    """The engine's own error about a request, as the engine would have given it."""
    kind = next((v for n, v in answer.headers if n.lower() == b"content-type"), b"application/json")
    phrase = answer.phrase.decode("ascii", "replace")
    return _whole(request, answer.status, phrase, b"content-type: %s\r\n" % kind, answer.body)


def page(request: Request, body: bytes) -> bytes:
    """An answer of the gateway's own to a GET."""
    return _whole(request, 200, "OK", b"content-type: application/json\r\n", body)


def _whole(request: Request, status: int, phrase: str, headers: bytes, body: bytes) -> bytes:
    if request.method == b"HEAD":
        # An answer to HEAD has no body, whatever its length says.
        request.keep_alive, body = False, b""
    return own_response(status, phrase, headers, body, close=not request.keep_alive)
