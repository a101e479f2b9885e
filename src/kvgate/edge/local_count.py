"""Prompt tokens of a request's parts, counted in this process with the model's own tokenizer.

Promises: one count for each part of the shape, in order; `CannotCount` where the engine has to be
asked instead. Pure CPU and synchronous: call it in a thread where `PromptCounter.is_long` says so.
"""

from __future__ import annotations

from kvgate.tokens import CannotCount, Count, PromptCounter
from kvgate.wire.dialects.shape import Conversation, Mixed, Part, RequestShape


def count_shape(
    counter: PromptCounter, shape: RequestShape, *, with_parts: bool = False
) -> tuple[Count, ...]:
    """A count for each part of `shape`. Raises `CannotCount`."""
    add_special = shape.body.fields.get("add_special_tokens", True) is not False
    return tuple(count_part(counter, part, add_special, with_parts) for part in shape.parts)


def count_part(counter: PromptCounter, part: Part, add_special: bool, with_parts: bool = False) -> Count:
    """Tokens of one part. Raises `CannotCount`."""
    if isinstance(part, list):
        return Count(len(part), "request", True)
    if isinstance(part, str):
        return counter.count_text(part, add_special)
    if isinstance(part, Conversation):
        fields = {**part.options, "messages": part.messages, "tools": part.tools or None}
        return counter.count_chat(fields, with_parts=with_parts)
    if isinstance(part, Mixed):
        # Tokens may merge, or not, where the pieces meet: each is counted with its own specials.
        pieces = [count_part(counter, piece, add_special) for piece in part.pieces]
        return Count(sum(piece.prompt_tokens for piece in pieces) + part.overhead, "bound", False)
    raise CannotCount(part.why)
