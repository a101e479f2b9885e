"""Embeddings, classification, scoring and reranking: prompts that are read, and nothing generated.

Promise: each input costs the blocks of its prompt, which is the price of an answer of one token (the
last token of an answer is never stored). Nothing is written into the body.
"""

from __future__ import annotations

from typing import Any

from kvgate.wire.body import BadBody, Body
from kvgate.wire.dialects.chats import conversation_of, messages_of
from kvgate.wire.dialects.fields import is_token_list, kind, refuse, text_of
from kvgate.wire.dialects.shape import Api, Mixed, Part, RequestShape, Unseen

INPUTS_MAX = 2048
# Tokens that a separator or a reranker's template puts around the two texts of a pair.
PAIR_OVERHEAD = 128
# The pairs of field names under which engines take what is to be scored.
SCORED = (("queries", "documents"), ("queries", "items"), ("query", "items"), ("data_1", "data_2"),
          ("text_1", "text_2"))  # fmt: skip


def read_embeddings(raw: bytes, *, names: tuple[str, ...] = ("input",)) -> RequestShape:
    """Embeddings, pooling and classification: `input`, or `messages` for a chat. Raises `BadBody`."""
    body = Body(raw)
    fields = body.fields
    refuse(fields, ("prompt_embeds", "input_embeds"), "cannot be priced; send the input itself")
    if fields.get("data") is not None or fields.get("image_data") is not None:
        return _shape(body, (Unseen("the input is not text"),))
    if fields.get("messages") is not None:
        return _shape(body, (conversation_of(messages_of(fields["messages"]), fields),))
    name = next((n for n in names if fields.get(n) is not None), names[0])
    return _shape(body, _inputs(fields.get(name), name))


def read_rerank(raw: bytes) -> RequestShape:
    """`query` with each of `documents` (or llama.cpp's and TEI's `texts`). Raises `BadBody`."""
    body = Body(raw)
    name = "texts" if body.fields.get("documents") is None and "texts" in body.fields else "documents"
    queries, documents = _inputs(body.fields.get("query"), "query"), _inputs(body.fields.get(name), name)
    if len(queries) != 1:
        raise BadBody("'query' must be one text", "query")
    return _shape(body, tuple(_pair(queries[0], document) for document in documents))


def read_score(raw: bytes) -> RequestShape:
    """Pairs: one with each, or each with its own. Raises `BadBody`."""
    body = Body(raw)
    fields = body.fields
    for first, second in SCORED:
        if fields.get(first) is not None and fields.get(second) is not None:
            left, right = _inputs(fields[first], first), _inputs(fields[second], second)
            if len(left) == 1:
                left *= len(right)
            if len(left) != len(right):
                raise BadBody(f"{first!r} must hold one text, or as many as {second!r}", first)
            return _shape(body, tuple(map(_pair, left, right)))
    raise BadBody("the texts to score are missing: send 'queries' and 'documents'", "queries")


def _inputs(value: Any, name: str) -> tuple[Part, ...]:
    if isinstance(value, str | dict):
        return (_input(value, name),)
    if not isinstance(value, list) or not value:
        raise BadBody(f"{name!r} must be a text or a list of texts, got {kind(value)}", name)
    if is_token_list(value):
        return (value,)
    if len(value) > INPUTS_MAX:
        raise BadBody(f"{name!r} may hold {INPUTS_MAX} inputs, got {len(value)}", name)
    return tuple(_input(item, name) for item in value)


def _input(item: Any, name: str) -> Part:
    if isinstance(item, str):
        return item
    if isinstance(item, list) and is_token_list(item):
        return item
    if isinstance(item, dict):
        shown = [item[key] for key in ("text", "content", "prompt_string") if isinstance(item.get(key), str)]
        # One text and nothing beside it but a type: the rest would not be counted.
        if len(shown) == 1 and set(item) <= {"text", "content", "prompt_string", "type"}:
            return str(shown[0])
        return Unseen("an input holds more than text")
    raise BadBody(f"{name!r} must hold only texts or token ids, got {kind(item)}", name)


def _pair(first: Part, second: Part) -> Part:
    if isinstance(first, str | list) and isinstance(second, str | list):
        return Mixed((first, second), PAIR_OVERHEAD)
    return first if isinstance(first, Unseen) else second


def _shape(body: Body, parts: tuple[Part, ...]) -> RequestShape:
    return RequestShape(
        body,
        is_chat=False,
        prompts=tuple(part for part in parts if isinstance(part, str | list)),
        output_cap=1,
        choices=1,
        stream=False,
        api=Api.POOLING,
        parts=parts,
        model=text_of(body.fields, "model"),
        generates=False,
    )
