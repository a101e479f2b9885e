"""vLLM's own figure for its longest request, out of the groups: what its start-up log calls concurrency.

Promise: the sum of vLLM 0.32 to the block. It is no price: it adds a block where a window spans the whole
context, and leaves out states in flight. It tells whether a configuration is that of the engine, and how
many tokens the engine may have in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvgate.core.geometry.groups import Group
from kvgate.core.geometry.layers import Kind
from kvgate.core.geometry.serving import Serving


def planned_blocks(
    groups: Sequence[Group], serving: Serving, in_flight: int, context: int, retained: int = 0
) -> int | None:
    """Blocks of a sequence of `context` tokens while `in_flight` tokens are not settled.

    `retained`: tokens kept below a window for drafting modules. None: what the encoder of a model with
    cross attention takes is not planned by its length.
    """
    total = 0
    for group in groups:
        size = group.block_size
        if group.kind is Kind.CROSS:
            return None
        if group.kind is Kind.SLIDING:
            total += -(-min(group.window - 1 + retained + in_flight, context) // size) + 1
        elif group.kind is Kind.CHUNKED:
            total += -(-min(group.window + in_flight, context) // size)
        elif group.kind is Kind.STATE:
            total += 1 + serving.draft_tokens + (1 + group.checkpoints if serving.states == "align" else 0)
        else:
            total += -(-context // size)
    return total
