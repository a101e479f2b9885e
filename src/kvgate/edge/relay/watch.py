"""What is read of an answer for the books, and how the engine is made to say it.

Promise: a client that did not ask for usage gets the stream that it would have got without the gate:
where the gate's own asking would change more than one event, it does not ask (`wire.sse`).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvgate.wire.dialects.shape import Api, RequestShape
from kvgate.wire.sse import TIMINGS, USAGE, ask_usage, gets_usage_asked


@dataclass(frozen=True, slots=True)
class Watch:
    """`mark`: what shows that an event tells of tokens; `strips`: one such event is the gate's own."""

    mark: bytes
    strips: bool = False


CLIENTS_OWN = Watch(USAGE)
_LLAMACPP = Watch(TIMINGS)
_GATES_OWN = Watch(USAGE, strips=True)
# The other APIs tell usage unasked, or not at all.
_HAS_STREAM_OPTIONS = frozenset({Api.CHAT, Api.COMPLETION})


def watch_for(body: bytes, shape: RequestShape, engine: str, *, may_ask: bool) -> tuple[bytes, Watch]:
    """The body to send, and what to look for in the answer. `may_ask`: the body may ask for usage
    although its client does not, and the event that comes of it can be taken out."""
    if not shape.stream or shape.api not in _HAS_STREAM_OPTIONS:
        return body, CLIENTS_OWN
    options = shape.body.fields.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        return body, CLIENTS_OWN
    if may_ask and gets_usage_asked(engine):
        asking = ask_usage(body, shape.body.fields)
        if asking is not None:
            return asking, _GATES_OWN
    return body, _LLAMACPP if engine == "llamacpp" else CLIENTS_OWN
