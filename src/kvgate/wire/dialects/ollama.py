"""Ollama's `/api/generate` and `/api/chat`, streamed as JSON lines unless the body says otherwise.

Promise: no field is read here that Ollama would read differently. Its parser takes field names in
any case, so a known name in other letters is refused, here and in the APIs it copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvgate.wire.body import BadBody, Body
from kvgate.wire.dialects.chats import conversation_of, messages_of
from kvgate.wire.dialects.fields import below, cap_of, flag, object_of, places, text_of
from kvgate.wire.dialects.shape import Api, Conversation, Mixed, Part, RequestShape, StreamKind, Unseen

# A model's template may add its own system text and markers; the gate does not see it.
TEMPLATE_OVERHEAD = 1024
_READ = (
    "best_of", "context", "format", "images", "input", "instructions", "keep_alive", "max_completion_tokens",
    "max_output_tokens", "max_tokens", "messages", "model", "n", "n_predict", "options",
    "previous_response_id", "prompt", "raw", "stream", "suffix", "system", "template", "think", "tools",
)  # fmt: skip


def in_exact_letters(read: Callable[[bytes], RequestShape]) -> Callable[[bytes], RequestShape]:
    """The same reader, for a parser to which `Max_Tokens` and `max_tokens` are one field."""

    def read_exactly(raw: bytes) -> RequestShape:
        shape = read(raw)
        for name in shape.body.fields:
            folded = name.casefold()
            if folded in _READ and name not in _READ:
                raise BadBody(f"write the field {name[:200]!r} as {folded!r}", name[:200])
        return shape

    return read_exactly


def read_ollama_generate(raw: bytes, *, default_cap: int | None = None) -> RequestShape:
    """The shape of an `/api/generate` body. Raises `BadBody`."""
    body = Body(raw)
    fields = body.fields
    names = ("system", "template", "prompt", "suffix")
    pieces = tuple(text for name in names if (text := text_of(fields, name)) is not None)
    part: Part = Mixed(pieces or ("",), TEMPLATE_OVERHEAD)
    if fields.get("context"):
        part = Unseen("'context' holds an earlier conversation")
    elif fields.get("images"):
        part = Unseen("the prompt holds images")
    return _shape(body, part, default_cap)


def read_ollama_chat(raw: bytes, *, default_cap: int | None = None) -> RequestShape:
    """The shape of an `/api/chat` body. Raises `BadBody`."""
    body = Body(raw)
    # An empty list is Ollama's way to load or unload a model.
    messages: Any = body.fields.get("messages")
    is_empty = messages in (None, [])
    part: Part = Conversation([]) if is_empty else conversation_of(messages_of(messages), body.fields)
    if not is_empty and any(message.get("images") for message in messages):
        part = Unseen("the prompt holds images")
    return _shape(body, part, default_cap)


def _shape(body: Body, part: Part, default_cap: int | None) -> RequestShape:
    options = object_of(body.fields, "options")
    if options.get("num_ctx") is not None:
        raise BadBody(
            "'options.num_ctx' would load the model again with another context, and change the memory "
            "that this gateway shares out; leave it out",
            "options.num_ctx",
        )
    # -1 is no limit and -2 the rest of the context.
    cap = cap_of(options, "num_predict", unset=(-1, -2), at="options.", zero=True)
    own: dict[str, int | None] = {"num_predict": cap}
    stream = flag(body.fields, "stream", True)
    return RequestShape(
        body,
        is_chat=isinstance(part, Conversation),
        prompts=(),
        output_cap=None if cap is None else max(1, cap),
        choices=1,
        stream=stream,
        api=Api.OLLAMA,
        parts=(part,),
        default_cap=default_cap,
        cap_places=below(("options",), places(options, ("num_predict",), "num_predict", own)),
        model=text_of(body.fields, "model"),
        stream_kind=StreamKind.NDJSON if stream else StreamKind.NONE,
    )
