"""One tenant's books: what it holds, what it was charged, and those of its requests that wait."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvgate.core.records import Ask, Key, Price, Seconds, Tenant


@dataclass(slots=True)
class Waiter:
    """A priced request in the line.

    `blocks` and `seqs` are what it is charged. `place`: when it first asked, which may be before it
    joined. `passes`: how often a later one was let in while this one was the head.
    """

    key: Key
    ask: Ask
    price: Price
    blocks: int
    seqs: int
    joined: Seconds
    deadline: Seconds
    place: Seconds
    passes: int = 0


@dataclass(slots=True, eq=False)
class Account:
    """What one tenant holds, was charged, and waits for (first come, first served)."""

    tenant: Tenant
    charged: float = 0.0
    held: int = 0
    waiting: list[tuple[Seconds, Key, Waiter]] = field(default_factory=list)
    blocks: int = 0  # of all that wait
    version: int = 0

    def may_take(self, blocks: int) -> bool:
        ceiling = self.tenant.ceiling
        return ceiling is None or self.held + blocks <= ceiling
