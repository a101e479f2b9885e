"""Prompt tokens of a request inside an application: by its owner's function, a tokenizer, or a bound.

Promise: never too low. What cannot be counted costs a bound, and what cannot be seen a whole context.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from kvgate.edge.asgi.messages import Headers
from kvgate.edge.counting.local_count import count_shape
from kvgate.edge.library.bells import in_thread
from kvgate.tokens import CannotCount, PromptCounter
from kvgate.wire.dialects.shape import RequestShape, whole_context
from kvgate.wire.engines import Engine
from kvgate.wire.engines.generic import GENERIC

Counts: TypeAlias = int | Sequence[int]
Count: TypeAlias = Callable[[RequestShape], Counts | Awaitable[Counts]]
"""A function of the application's own: the prompt tokens of each part of the shape."""


class CountRefused(Exception):
    """Counting showed that the application would refuse the request; the answer is its own."""

    def __init__(self, status: int, headers: Headers, body: bytes) -> None:
        super().__init__(f"the application answered {status} to a counting call")
        self.status = status
        self.headers = headers
        self.body = body


async def count_prompts(
    shape: RequestShape, with_: Count | PromptCounter | None, engine: Engine, context: int
) -> tuple[int, ...]:
    """Prompt tokens of each part of `shape`."""
    if shape.priced_as_whole_context or engine.is_partitioned:
        return whole_context(shape, context, shape.effective_cap)
    if with_ is None:
        return _bound(shape, context)
    if isinstance(with_, PromptCounter):
        try:
            if with_.is_long(len(shape.body.text)):
                counts = await in_thread(count_shape, with_, shape)
            else:
                counts = count_shape(with_, shape)
        except CannotCount:
            return _bound(shape, context)
        return tuple(count.prompt_tokens for count in counts)
    given = with_(shape)
    found = await given if inspect.isawaitable(given) else given
    return (found,) if isinstance(found, int) else tuple(found)


def _bound(shape: RequestShape, context: int) -> tuple[int, ...]:
    return GENERIC.plan(shape).known or whole_context(shape, context, shape.effective_cap)
