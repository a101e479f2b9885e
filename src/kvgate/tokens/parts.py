"""A prompt's tokens by the part of the request that they come from.

Promises: the parts add up to all tokens. A token belongs to the part in which its first character
stands; what the template writes itself, and what it changed beyond recognition, is `template`.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

from kvgate.tokens.records import Part
from kvgate.tokens.template import Rendered


def split_parts(rendered: Rendered, starts: list[int]) -> tuple[Part, ...]:
    """`starts`: the offset in characters of each token in the rendered text, ascending."""
    totals: dict[str, int] = {}
    covered = 0
    for name, begin, end in _spans(rendered):
        tokens = bisect_left(starts, end) - bisect_left(starts, begin)
        totals[name] = totals.get(name, 0) + tokens
        covered += tokens
    totals["template"] = len(starts) - covered
    return tuple(Part(name, tokens) for name, tokens in totals.items())


def _spans(rendered: Rendered) -> Iterator[tuple[str, int, int]]:
    """(part, begin, end) in the rendered text; they do not overlap."""
    text = rendered.text
    taken: list[tuple[int, int]] = []
    for tool in rendered.tools or ():
        span = _free(text, json.dumps(tool, ensure_ascii=False), 0, taken)
        if span:
            yield ("tools", *span)
    after = 0
    for index, message in enumerate(rendered.messages):
        name = "system" if message["role"] in ("system", "developer") else f"messages[{index}]"
        for piece in _texts(message):
            span = _free(text, piece, after, taken) or _free(text, piece, 0, taken)
            if span:
                after = max(after, span[1])
                yield (name, *span)


def _free(text: str, piece: str, after: int, taken: list[tuple[int, int]]) -> tuple[int, int] | None:
    piece = piece.strip()
    begin = text.find(piece, after) if piece else -1
    while begin >= 0:
        end = begin + len(piece)
        inside = next((span for span in taken if span[0] < end and begin < span[1]), None)
        if inside is None:
            taken.append((begin, end))
            return begin, end
        begin = text.find(piece, inside[1])
    return None


def _texts(message: dict[str, Any]) -> Iterator[str]:
    for name in ("reasoning_content", "content"):
        value = message.get(name)
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            yield from (part["text"] for part in value if isinstance(part.get("text"), str))
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        if isinstance(function.get("name"), str):
            yield function["name"]
        yield json.dumps(function.get("arguments"), ensure_ascii=False)
