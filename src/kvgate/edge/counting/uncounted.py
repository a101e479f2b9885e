"""What is proven of prompts before anybody has counted them: at least so many tokens, at most so many.

Promises: both hold for the very text that the engine tokenizes, if its tokenizer is the one at hand; for
a chat that is what its template writes, because a template may leave out what a request holds, or write
more. Both take far less time than a count. None: nothing is proven, or to prove it would take as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvgate.edge.counting.counted import Prompts
from kvgate.edge.counting.local_count import chat_fields
from kvgate.tokens import CannotCount
from kvgate.tokens.bounds import Proofs
from kvgate.wire.dialects.shape import Conversation, Mixed, Part, RequestShape

# A chat with more pieces is not written out on the loop: each takes about 2 us.
PIECES_MAX = 1_000
# Nor one with more values in its tools, their calls and its documents: as JSON each takes up to 1 us.
VALUES_MAX = 4_000
# Fields by which some engine cuts a prompt that is too long. What is left of it is not known here.
_CUTTING = frozenset({"truncate_prompt_tokens", "truncate", "truncation", "truncation_side"})


def is_cut(shape: RequestShape) -> bool:
    """Whether the engine may be asked to take only a part of a long prompt."""
    fields = shape.body.fields
    inner = fields.get("parameters")
    return not _CUTTING.isdisjoint(fields) or (isinstance(inner, dict) and not _CUTTING.isdisjoint(inner))


def least_at_best(proofs: Proofs, shape: RequestShape) -> Prompts | None:
    """What could be proven if a request held nothing but letters: not worth a look where that fits."""
    words = proofs.words
    if words is None:
        return None
    return tuple(
        len(part if isinstance(part, list | str) else shape.body.text) // words.in_token + 1
        for part in shape.parts
    )


def least_of(proofs: Proofs, shape: RequestShape, enough: int) -> Prompts | None:
    """At least so many tokens has each prompt; more than `enough` are not looked for."""
    words = proofs.words
    if words is None:
        return None
    return _of_each(proofs, shape, lambda part, texts: sum(words.least(text, enough) for text in texts))


def most_of(proofs: Proofs, shape: RequestShape) -> Prompts | None:
    """Each prompt has at most so many tokens, special ones around it included."""
    return _of_each(proofs, shape, lambda part, texts: _most(proofs, part, texts))


def _most(proofs: Proofs, part: Part, texts: list[str]) -> int | None:
    total = 0
    for text in texts:
        most = proofs.most(text)
        if most is None:
            return None
        total += most
    if isinstance(part, Mixed):
        total += part.overhead + sum(len(piece) for piece in part.pieces if isinstance(piece, list))
    return total


def _of_each(
    proofs: Proofs, shape: RequestShape, bound: Callable[[Part, list[str]], int | None]
) -> Prompts | None:
    """A bound for each prompt out of its texts; token ids are their own. None: one has no bound."""
    found = []
    for part in shape.parts:
        if isinstance(part, list):
            found.append(len(part))
            continue
        texts = _texts(proofs, part)
        number = None if texts is None else bound(part, texts)
        if number is None:
            return None
        found.append(number)
    return tuple(found)


def _texts(proofs: Proofs, part: Part) -> list[str] | None:
    """The texts that are tokenized for a part, the token ids of a mixed one apart."""
    if isinstance(part, str):
        return [part]
    if isinstance(part, Mixed):
        return [piece for piece in part.pieces if isinstance(piece, str)]
    if not isinstance(part, Conversation) or part.media or not _is_soon_written(part):
        return None
    try:
        return [proofs.written(chat_fields(part))]
    except CannotCount:
        return None


def _is_soon_written(part: Conversation) -> bool:
    """Whether a template has little to do with it, apart from long texts."""
    pieces = len(part.messages) + len(part.tools)
    calls: list[Any] = []
    for message in part.messages:
        for name in ("content", "tool_calls"):
            value = message.get(name)
            pieces += len(value) if isinstance(value, list) else 0
        calls.append(message.get("tool_calls"))
    return (
        pieces <= PIECES_MAX
        and _has_few_values([part.tools, part.options])
        and _has_few_values(calls, reads_text=True)
    )


def _has_few_values(nested: list[Any], *, reads_text: bool = False) -> bool:
    """Whether few values are written out as JSON. `reads_text`: arguments of calls are JSON themselves."""
    found = 0
    while nested and found <= VALUES_MAX:
        one = nested.pop()
        if isinstance(one, dict | list):
            found += len(one)
            if found <= VALUES_MAX:
                nested += one.values() if isinstance(one, dict) else one
        elif reads_text and isinstance(one, str):
            # No value stands elsewhere than behind one of these.
            found += sum(map(one.count, ",[{"))
    return found <= VALUES_MAX
