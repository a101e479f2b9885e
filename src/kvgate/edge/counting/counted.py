"""What a count is, and how one that takes time is answered. Shared by every source of counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from kvgate.core.record import record
from kvgate.edge.relay.pool import EngineUnavailable, Fetched

Prompts: TypeAlias = tuple[int, ...]
"""Tokens of each prompt of a request."""


@record
class Counted:
    """Tokens of each prompt; `prompts` is None where each one is priced as a whole context.

    `source`: request (token ids), tokenizer, engine, bound (never too low), or whole_context.
    """

    prompts: Prompts | None
    source: str


class CountRefused(Exception):
    """The engine answered a counting call with an error of its own; it is the client's to read."""

    def __init__(self, answer: Fetched) -> None:
        super().__init__(f"the engine answered {answer.status} to a counting call")
        self.answer = answer


Outcome: TypeAlias = Counted | CountRefused | EngineUnavailable
Answer: TypeAlias = Callable[[Outcome], None]
"""Called once on the loop's thread, later than the call that it was given to; not after `cancel`."""


class Counting(Protocol):
    """A count that is under way."""

    def cancel(self) -> None:
        """Nobody waits for it any more."""
