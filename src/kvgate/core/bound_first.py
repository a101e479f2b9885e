"""When an upper bound of a prompt is enough to let a request in, and what it holds once it is counted.

Promises: what is let in on a bound takes nothing from anybody who waits, leaves as much free as it takes,
and is told the very output cap that its exact count would have given it. Correcting it never takes more.
"""

from __future__ import annotations

from dataclasses import replace

from kvgate.core.gate import Gate
from kvgate.core.price import price, requested_cap
from kvgate.core.records import Ask, PoolFacts, Price, Reason


def is_easy(gate: Gate, ask: Ask) -> bool:
    """Whether `ask`, whose prompts are upper bounds, need not wait for its count.

    Its cap must be set, by the client or by a default: an unset one is the rest of the context, of which
    a bound would leave less.
    """
    if gate.line or gate.places:
        return False
    facts, cap = gate.facts, requested_cap(ask.output_cap, ask.rules)
    if cap is None or max(ask.prompts) + cap > facts.context:
        return False
    priced = price(ask, facts)
    if isinstance(priced, Reason):
        return False
    room, ceiling = gate.ledger.free_blocks, ask.tenant.ceiling
    if ceiling is not None:
        room = min(room, ceiling - gate.line.shares.account(ask.tenant).held)
    return 2 * gate.policy(ask, priced, facts)[0] <= room


def settled_blocks(gate: Gate, ask: Ask, prompts: tuple[int, ...], held: int, facts: PoolFacts) -> int:
    """What a request that `held` so many blocks for `ask` needs, now that its prompts are counted.

    `facts`: of the pool when it was let in; its blocks are of that size.
    """
    exact = replace(ask, prompts=prompts)
    priced = price(exact, facts)
    return min(held, gate.policy(exact, priced, facts)[0]) if isinstance(priced, Price) else held
