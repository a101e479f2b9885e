"""Anthropic's messages API, as the engines serve it. `count_tokens` generates nothing and is free."""

from __future__ import annotations

from kvgate.wire.body import BadBody, Body
from kvgate.wire.dialects.chats import from_anthropic
from kvgate.wire.dialects.fields import cap_of, flag, places, refuse_outliving, text_of
from kvgate.wire.dialects.shape import Api, Part, RequestShape, StreamKind, Unseen

# Fields that let the engine generate again with what it fetched itself.
ENGINE_LOOPS = ("mcp_servers", "container")


def read_messages(raw: bytes, *, default_cap: int | None = None) -> RequestShape:
    """The shape of a `/v1/messages` body. Raises `BadBody`.

    `max_tokens` is needed, except where the engine has a default for it.
    """
    body = Body(raw)
    fields = body.fields
    refuse_outliving(fields)
    part: Part = from_anthropic(fields)
    loop = next((name for name in ENGINE_LOOPS if fields.get(name)), None)
    if loop is not None:
        part = Unseen(f"{loop!r} makes the engine generate again with what it fetched")
    cap = cap_of(fields, "max_tokens")
    if cap is None and default_cap is None:
        raise BadBody("'max_tokens' is needed and must be an integer of at least 1", "max_tokens")
    stream = flag(fields, "stream")
    return RequestShape(
        body,
        is_chat=True,
        prompts=(),
        output_cap=cap,
        choices=1,
        stream=stream,
        api=Api.MESSAGES,
        parts=(part,),
        default_cap=default_cap,
        cap_places=places(fields, ("max_tokens",), "max_tokens", {"max_tokens": cap}),
        model=text_of(fields, "model"),
        stream_kind=StreamKind.SSE if stream else StreamKind.NONE,
    )
