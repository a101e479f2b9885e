"""What an episode is made of, drawn from its seed: the pool, the requests, the mix of faults.

Every knob has an "off": a fault that is always on hides what happens without it. Times are small
whole numbers on purpose: things that happen at the same moment are where mistakes live.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from kvgate.core.records import ANYONE, Ask, CapRules, PoolFacts, Tenant
from kvgate.lab.auditor import Client


@dataclass(frozen=True, slots=True)
class Swarm:
    """Shares of the clients that cancel, signal twice, over-estimate, wait; counts of faults."""

    clients: int
    cancels: float
    doubles: float
    estimates: float
    waits: float
    deaths: int
    resizes: int
    passes: int  # how often the head of the line may be passed
    lag: int  # longest time between an event and the news of it
    tenants: tuple[Tenant, ...]
    floors: tuple[tuple[int, float], ...]  # (priority, share of the pool)
    known: float  # share of the clients that are known when they come back

    @classmethod
    def draw(cls, rng: Random) -> Swarm:
        share = (0.0, 0.3, 0.9)
        return cls(
            clients=rng.randint(3, 16),
            cancels=rng.choice(share),
            doubles=rng.choice(share),
            estimates=rng.choice(share),
            waits=rng.choice(share),
            deaths=rng.choice((0, 0, 1, 3)),
            resizes=rng.choice((0, 0, 1, 4)),
            passes=rng.choice((0, 1, 2, 8)),
            lag=rng.choice((0, 2)),
            tenants=draw_tenants(rng),
            floors=rng.choice(((), (), ((0, 0.3),), ((0, 0.2), (1, 0.5)))),
            known=rng.choice((0.0, 0.0, 0.6)),
        )


def draw_tenants(rng: Random) -> tuple[Tenant, ...]:
    if rng.random() < 0.5:
        return (ANYONE,)
    return tuple(
        Tenant(
            f"t{number}",
            weight=rng.choice((0.5, 1.0, 1.0, 4.0)),
            ceiling=rng.choice((None, None, rng.randint(1, 60))),
            priority=rng.choice((0, 0, 0, 1, 2)),
        )
        for number in range(rng.randint(1, 3))
    )


def draw_pool(rng: Random) -> PoolFacts:
    context = rng.choice((12, 24, 40))
    block_size = rng.choice((1, 2, 3, 8))
    total_blocks = -(-rng.randint(context // 2, 6 * context) // block_size)
    return PoolFacts(
        total_blocks=total_blocks,
        block_size=block_size,
        context=context,
        max_seqs=rng.choice((None, 1, 2, 3, 8)),
        safety_fraction=rng.choice((1.0, 0.9, 0.5)),
        lookahead=rng.choice((0, 0, 2)),
        engine_context=(None, context, context + 1)[total_blocks % 3],
    )


def draw_resize(rng: Random, facts: PoolFacts) -> PoolFacts:
    return replace(
        facts,
        total_blocks=max(1, rng.randint(0, 6 * facts.context) // facts.block_size),
        max_seqs=rng.choice((None, 1, 2, 8)),
        safety_fraction=rng.choice((1.0, 0.9, 0.3)),
    )


def draw_client(rng: Random, facts: PoolFacts, swarm: Swarm) -> Client:
    # Short prompts are the common case; some fill the context, and must be refused.
    truth = tuple(
        -(-rng.randint(1, facts.context + 1) // rng.randint(1, 6)) for _ in range(rng.choice((1, 1, 1, 2)))
    )
    estimated = rng.random() < swarm.estimates
    ask = Ask(
        prompts=tuple(p + rng.randint(0, 5) for p in truth) if estimated else truth,
        output_cap=rng.choice((None, 1, rng.randint(1, facts.context))),
        choices=rng.choice((1, 1, 1, 2, 3)),
        rules=CapRules(default=rng.choice((None, None, 5)), ceiling=rng.choice((None, None, 9))),
        max_wait=float(rng.choice((1, 5, 30, 200))) if rng.random() < swarm.waits else 0.0,
        draw=rng.random(),
        tenant=rng.choice(swarm.tenants),
        # Few numbers, so that some clients are taken for each other.
        identity=rng.randint(1, 12) if rng.random() < swarm.known else 0,
    )
    return Client(ask, truth, answer=rng.choice((1, rng.randint(1, 40), 1000)))
