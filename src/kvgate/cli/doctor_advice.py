"""What `kvgate doctor` advises where nothing is wrong. Findings only; no I/O."""

from __future__ import annotations

from kvgate.core.price import blocks_for
from kvgate.edge.upstreams.discovery import Finding, Found, Level
from kvgate.wire.engines.known import ENGINES


def unset_caps(found: Found) -> list[Finding]:
    """What a request with no output cap costs, where that keeps others out."""
    facts = found.facts
    if facts is None or ENGINES[found.engine].is_partitioned:
        return []
    blocks = blocks_for(1, facts.context - 1, facts) if facts.context > 1 else 1
    fit = facts.usable_blocks // blocks
    if facts.max_seqs is not None and fit >= facts.max_seqs:
        return []  # as many as the engine runs at all
    what = (
        f"a request with no output cap is reserved the rest of the context, up to {blocks:,} of "
        f"{facts.usable_blocks:,} blocks: {fit:,} at once"
    )
    if found.engine == "vllm":
        what += (
            "; a lower default out of the model's generation_config, or of --override-generation-config, is "
            "on no page, so it is not counted on: safe, and wasteful"
        )
    fix = "set --default-output-cap N at kvgate: it is enforced, and requests that say more still get more"
    return [Finding("unset_caps", Level.NOTE, what, fix)]
