"""The pool of a running engine for `kvgate plan`, in place of hardware."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import click

from kvgate.cli.doctor import examine
from kvgate.core.geometry import Serving, layout_for
from kvgate.core.geometry.capacity import Capacity
from kvgate.edge.upstreams.discovery import Given


def pool_at(url: str, config: Mapping[str, Any], serving: Serving, safety_fraction: float) -> Capacity:
    """Ask the engine at `url`. Only vLLM's blocks are cut up as the plan's groups are."""
    given = Given(model_config=config, serving=serving, safety_fraction=safety_fraction)
    found = asyncio.run(examine(url, given=given)).found
    if found.facts is None:
        raise click.ClickException("; ".join(found.unknown))
    if found.engine != "vllm":
        raise click.UsageError(
            f"--upstream: {found.engine} runs there, and a plan understands vLLM's blocks only; "
            f"see kvgate doctor {url}"
        )
    layout = found.facts.geometry or layout_for(config, serving)
    return Capacity(layout, found.facts.total_blocks, found.facts.context)
