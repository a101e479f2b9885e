"""What a request would be answered now, and why. Changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgate.core.records import Ask, Granted
from kvgate.edge import clock
from kvgate.wire.engines import CountPlan
from kvgate.wire.refusal import message_of, status_of

if TYPE_CHECKING:
    from kvgate.edge.gateway import Gateway


def explain_ask(gateway: Gateway, ask: Ask, plan: CountPlan, cap_name: str) -> dict[str, object]:
    """What `ask` would be answered now, as the admin server shows it. Changes nothing."""
    facts = gateway.gate.facts
    given = gateway.gate.explain(ask, clock.now())
    shown: dict[str, object] = {
        "prompt_tokens": sum(ask.prompts),
        "count_source": "whole_context" if plan.is_whole_context else plan.source,
        "sequences": ask.choices * len(ask.prompts),
        "output_cap_was_set": ask.output_cap is not None,
        "block_size": facts.block_size,
        "context": facts.context,
        "usable_tokens": facts.usable_blocks * facts.block_size,
        "free_tokens": gateway.gate.ledger.free_blocks * facts.block_size,
    }
    if isinstance(given, Granted):
        return shown | {
            "decision": "admit",
            "reason": None,
            "status": 200,
            "output_cap": given.output_cap,
            "needed_blocks": given.blocks,
            "needed_tokens": given.blocks * facts.block_size,
            "output_cap_that_fits": given.output_cap,
            "message": "It would be admitted now.",
        }
    return shown | {
        "decision": "refuse",
        "reason": given.reason.value,
        "status": status_of(given.reason, gateway.settings.busy_status),
        "output_cap": given.output_cap,
        "needed_blocks": given.needed_tokens // facts.block_size,
        "needed_tokens": given.needed_tokens,
        "output_cap_that_fits": given.output_cap_that_fits,
        "message": message_of(given, cap_name),
    }
