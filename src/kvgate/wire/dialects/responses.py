"""OpenAI's responses API.

Promise: what a body hides from the gate (a stored response, a conversation, an item by reference, a
tool that the engine calls itself and whose output it feeds back) is priced as a whole context. An
answer in the background is refused: it outlives its client, so nobody could hold its memory.
"""

from __future__ import annotations

from kvgate.wire.body import BadBody, Body
from kvgate.wire.dialects.chats import from_responses
from kvgate.wire.dialects.fields import cap_of, flag, places, refuse, refuse_outliving, text_of
from kvgate.wire.dialects.shape import Api, Part, RequestShape, StreamKind, Unseen

# Fields that bring in a prompt that is stored at the engine.
STORED = ("previous_response_id", "conversation", "prompt")
# Tools that the client runs; all others are run by the engine, which then generates again.
CLIENT_TOOLS = frozenset({"function", "custom"})


def read_responses(raw: bytes, *, default_cap: int | None = None) -> RequestShape:
    """The shape of a `/v1/responses` body. Raises `BadBody`."""
    body = Body(raw)
    fields = body.fields
    if flag(fields, "background"):
        raise BadBody("'background' is not taken: the answer would outlive its connection", "background")
    refuse(
        fields, ("prompt_embeds", "input_ids", "previous_input_messages"), "cannot be priced; send 'input'"
    )
    refuse_outliving(fields)
    conversation = from_responses(fields)
    part: Part = conversation
    stored = next((name for name in STORED if fields.get(name) is not None), None)
    given = fields.get("input")
    items = given if isinstance(given, list) else []
    if stored is not None:
        part = Unseen(f"{stored!r} adds a prompt that is stored at the engine")
    elif any(item.get("type") == "item_reference" for item in items):
        part = Unseen("an item reference adds what is stored at the engine")
    elif any(tool.get("type", "function") not in CLIENT_TOOLS for tool in fields.get("tools") or []):
        part = Unseen("a built-in tool makes the engine generate again with what the tool gave")
    stream = flag(fields, "stream")
    cap = cap_of(fields, "max_output_tokens")
    return RequestShape(
        body,
        is_chat=True,
        prompts=(),
        output_cap=cap,
        choices=1,
        stream=stream,
        api=Api.RESPONSES,
        parts=(part,),
        default_cap=default_cap,
        cap_places=places(fields, ("max_output_tokens",), "max_output_tokens", {"max_output_tokens": cap}),
        model=text_of(fields, "model"),
        stream_kind=StreamKind.SSE if stream else StreamKind.NONE,
    )
