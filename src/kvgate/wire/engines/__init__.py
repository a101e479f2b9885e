"""What differs between engines: counting endpoints, cap rules, abort grace, headers to drop."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from kvgate.wire.dialects.openai import Shape


@dataclass(frozen=True, slots=True)
class CountCall:
    """One POST to the engine that answers with a number of prompt tokens."""

    path: str
    body: bytes
    read: Callable[[bytes], int]


class NoCount(ValueError):
    """The engine's answer to a counting call holds no count."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The rules of one kind of engine.

    `completions_default_cap`: new tokens of a completion with no cap (None: rest of the context).
    `abort_grace`: seconds after its connection closed until the engine has surely let go.
    `idle_connection`: seconds after which an unused connection is not trusted to be open.
    `drop_headers`: request headers that would defeat the gate.
    """

    name: str
    count_calls: Callable[[Shape], list[CountCall | int]]
    completions_default_cap: int | None
    abort_grace: float
    idle_connection: float
    drop_headers: frozenset[bytes] = frozenset()


def per_prompt(shape: Shape, call_for: Callable[[str], CountCall]) -> list[CountCall | int]:
    """One call for each prompt that is text; token ids are their own count."""
    return [call_for(prompt) if isinstance(prompt, str) else len(prompt) for prompt in shape.prompts]


def read_number(name: str) -> Callable[[bytes], int]:
    """A reader of `{name: N}`."""

    def read(raw: bytes) -> int:
        try:
            value = json.loads(raw)[name]
        except (ValueError, KeyError, TypeError):
            raise NoCount(f"no {name!r} in the answer") from None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise NoCount(f"{name!r} is not a count")
        return value

    return read
