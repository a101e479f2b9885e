"""Prompt tokens of a request's parts, counted here with the model's own tokenizer.

Promises: one count for each part of the shape, in order; `CannotCount` where the engine has to be
asked instead, which includes every case in which the engine is known to write the prompt in another
way than the model's template. Pure CPU and synchronous; `off_loop` calls it where that takes long.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvgate.tokens import BadTokenizer, CannotCount, Count, PromptCounter, load
from kvgate.wire.dialects.shape import Api, Conversation, Mixed, Part, RequestShape

# llama.cpp writes tools, formats and tool calls into the prompt by code of its own.
_LLAMACPP_OWN = ("tools", "functions", "response_format", "tool_choice", "documents")
# These run the chat template as transformers does.
_TEMPLATE_ENGINES = frozenset({"vllm", "sglang"})


def tokenizer_for(engine: str, directory: str | None) -> PromptCounter | None:
    """The counter for the model in `directory`, as `engine` uses it. Raises `ValueError` with the fix."""
    if directory is None:
        return None
    try:
        return load(directory, chat_adds_bos=engine == "llamacpp")
    except BadTokenizer as error:
        raise ValueError(str(error)) from None


def refuse_own_prompts(engine: str, shape: RequestShape, counter: PromptCounter) -> None:
    """Raises `CannotCount` where `engine` does not use the model's template for this request."""
    if engine == "llamacpp" and any(counter.spells_special(text) for text in _texts(shape.parts)):
        raise CannotCount("the text spells out a special token, which llama.cpp's vocabulary may lack")
    if not shape.is_chat:
        return
    if shape.api is not Api.CHAT:
        raise CannotCount("the engine turns this API's messages into a chat by rules of its own")
    if counter.renders_as_vllm and engine == "vllm":
        return
    if engine in _TEMPLATE_ENGINES or counter.renders_as_vllm:
        if counter.rendered_by is not None:
            raise CannotCount(f"{engine} writes this model's prompts with {counter.rendered_by}")
        return
    if engine != "llamacpp":
        raise CannotCount("it is not known how the engine writes a chat")
    for part in shape.parts:
        if isinstance(part, Conversation) and (
            any(part.options.get(name) for name in _LLAMACPP_OWN)
            or part.tools
            or part.media
            or any("tool_calls" in message or message["role"] == "tool" for message in part.messages)
        ):
            raise CannotCount("llama.cpp writes tools, formats and media into the prompt by itself")


def _texts(parts: tuple[Part, ...]) -> Iterator[str]:
    """What the client wrote, wherever it stands."""
    for part in parts:
        if isinstance(part, str):
            yield part
        elif isinstance(part, Mixed):
            yield from _texts(part.pieces)
        elif isinstance(part, Conversation):
            yield from _strings(part.messages)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


def count_shape(
    counter: PromptCounter, shape: RequestShape, *, with_parts: bool = False
) -> tuple[Count, ...]:
    """A count for each part of `shape`. Raises `CannotCount`."""
    return count_parts(counter, shape.parts, adds_special(shape), with_parts=with_parts)


def adds_special(shape: RequestShape) -> bool:
    """Whether the engine puts the tokenizer's special tokens around a text."""
    return shape.body.fields.get("add_special_tokens", True) is not False


def count_parts(
    counter: PromptCounter, parts: tuple[Part, ...], add_special: bool, *, with_parts: bool = False
) -> tuple[Count, ...]:
    """The same, of parts that have left their request."""
    return tuple(count_part(counter, part, add_special, with_parts) for part in parts)


def count_part(counter: PromptCounter, part: Part, add_special: bool, with_parts: bool = False) -> Count:
    """Tokens of one part. Raises `CannotCount`."""
    if isinstance(part, list):
        return Count(len(part), "request", True)
    if isinstance(part, str):
        return counter.count_text(part, add_special)
    if isinstance(part, Conversation):
        return counter.count_chat(chat_fields(part), with_parts=with_parts)
    if isinstance(part, Mixed):
        # Tokens may merge, or not, where the pieces meet: each is counted with its own specials.
        pieces = [count_part(counter, piece, add_special) for piece in part.pieces]
        return Count(sum(piece.prompt_tokens for piece in pieces) + part.overhead, "bound", False)
    raise CannotCount(part.why)


def chat_fields(part: Conversation) -> dict[str, Any]:
    """A conversation as the body of a chat completion."""
    return {**part.options, "messages": part.messages, "tools": part.tools or None}


def source_of(counts: tuple[Count, ...]) -> str:
    """The weakest source: one bound among exact counts makes the sum a bound."""
    sources = {count.source for count in counts}
    return next(name for name in ("bound", "tokenizer", "request") if name in sources)
