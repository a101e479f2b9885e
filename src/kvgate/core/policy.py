"""How much a request is charged against the pool.

`worst_case` is the product: the only policy of which "guaranteed" may be said. The others are how
systems commonly admit today; they exist so that `kvgate demo --strategies` can show what each of
them costs, and no option of `kvgate serve` selects them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from kvgate.core.records import Ask, PoolFacts, Price

Policy: TypeAlias = Callable[[Ask, Price, PoolFacts], tuple[int, int]]
"""(request, its worst case, the pool) -> (blocks, sequences) to reserve."""


def worst_case(ask: Ask, price: Price, facts: PoolFacts) -> tuple[int, int]:
    """Prompt + output cap, for every sequence: what the request is allowed to reach."""
    return price.blocks, price.sequences


def unsafe_none(ask: Ask, price: Price, facts: PoolFacts) -> tuple[int, int]:
    """UNSAFE, for comparison only: everything is let in."""
    return 0, 0


def unsafe_concurrency(ask: Ask, price: Price, facts: PoolFacts) -> tuple[int, int]:
    """UNSAFE, for comparison only: count requests against the engine's sequence slots."""
    return 0, price.sequences


def unsafe_prompt_only(ask: Ask, price: Price, facts: PoolFacts) -> tuple[int, int]:
    """UNSAFE, for comparison only: charge the prompt that the request arrives with."""
    blocks = sum(ask.choices * -(-max(p, 1) // facts.block_size) for p in ask.prompts)
    return min(blocks, facts.usable_blocks), price.sequences
