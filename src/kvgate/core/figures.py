"""The figures that a refusal tells: what was needed, what is free, and which cap would get in."""

from __future__ import annotations

from kvgate.core.price import output_cap_that_fits, worst_case_blocks
from kvgate.core.records import Ask, Key, PoolFacts, Reason, Refused


def figures(
    reason: Reason,
    ask: Ask,
    facts: PoolFacts,
    free_blocks: int,
    free_seqs: int | None,
    tenant_room: int | None,
    key: Key | None = None,
) -> Refused:
    """A refusal with its figures.

    `free_blocks` and `free_seqs` are what a newcomer could get now (None: no limit on sequences);
    `tenant_room` what is left below its tenant's ceiling (None: there is none).
    """
    blocks, cap = worst_case_blocks(ask, facts)
    usable = facts.most_blocks if reason is Reason.KV_CAPACITY_EXCEEDED else facts.usable_blocks
    ceiling = ask.tenant.never_above if reason is Reason.KV_CAPACITY_EXCEEDED else ask.tenant.ceiling
    if ceiling is not None:
        usable = min(usable, ceiling)
    free = free_blocks if tenant_room is None else min(free_blocks, tenant_room)
    if reason is Reason.KV_CAPACITY_EXCEEDED:
        fits = output_cap_that_fits(ask, facts, usable, facts.max_seqs)
    elif reason is Reason.CONTEXT_LENGTH_EXCEEDED:
        fits = None
    else:
        fits = output_cap_that_fits(ask, facts, free, free_seqs)
    return Refused(
        reason,
        key,
        prompt_tokens=sum(ask.prompts),
        needed_tokens=blocks * facts.block_size,
        free_tokens=free * facts.block_size,
        usable_tokens=usable * facts.block_size,
        context=facts.context,
        output_cap=cap,
        output_cap_was_set=ask.output_cap is not None,
        output_cap_that_fits=fits,
    )
