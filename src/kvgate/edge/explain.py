"""What a request would be answered now, and why. Changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgate.core.records import Ask, Granted
from kvgate.edge import clock
from kvgate.edge.counting.counter import CountRefused
from kvgate.edge.relay.pool import EngineUnavailable
from kvgate.edge.upstreams import routing
from kvgate.edge.upstreams.upstream import Upstream
from kvgate.wire.body import BadBody
from kvgate.wire.refusal import message_of, status_of

if TYPE_CHECKING:
    from kvgate.edge.gateway import Gateway


async def explain_request(gateway: Gateway, path: str, body: bytes) -> dict[str, Any]:
    """What a POST of `body` to `path` would be answered now. Counts it as the request would be."""
    at = path.partition("?")[0].encode("utf-8")
    route = gateway.fleet.route_for(b"POST", at)
    if route is None:
        return _refused("unpriced_endpoint", f"{path} is not priced.")
    try:
        shape, route, pools = gateway.fleet.read(route, at, body)
        counted = await routing.first_up(pools).counter.of(shape, [], b"127.0.0.1")
    except BadBody as error:
        return _refused("invalid_request", str(error))
    except routing.NotServed as error:
        return _refused(error.reason.value, str(error))
    except CountRefused as error:
        return _refused("engine_error", error.answer.body.decode("utf-8", "replace"))
    except EngineUnavailable as error:
        return _refused("engine_unavailable", str(error))
    upstream, ask = gateway.choose(pools, shape, counted.prompts, [])
    shown = explain_ask(gateway, upstream, ask, counted.source, route.cap_name)
    return shown | {"upstream": upstream.label, "pools": [_beside(u, upstream) for u in pools]}


def _refused(reason: str, message: str) -> dict[str, Any]:
    return {"decision": "refuse", "reason": reason, "message": message}


def _beside(upstream: Upstream, chosen: Upstream) -> dict[str, object]:
    """Why a pool was chosen, or was not: what it has free, and whether it can be reached."""
    return {
        "upstream": upstream.label,
        "chosen": upstream is chosen,
        "up": upstream.is_up,
        "free_tokens": upstream.gate.ledger.free_blocks * upstream.facts.block_size,
        "usable_tokens": upstream.facts.usable_blocks * upstream.facts.block_size,
        "waiting": len(upstream.gate.line),
    }


def explain_ask(
    gateway: Gateway, upstream: Upstream, ask: Ask, count_source: str, cap_name: str
) -> dict[str, Any]:
    """What `ask` would be answered now, as the admin server shows it. Changes nothing."""
    facts, gate = upstream.facts, upstream.gate
    given = gate.explain(ask, clock.now())
    shown: dict[str, Any] = {
        "prompt_tokens": sum(ask.prompts),
        "count_source": count_source,
        "sequences": ask.choices * len(ask.prompts),
        "output_cap_was_set": ask.output_cap is not None,
        "block_size": facts.block_size,
        "context": facts.context,
        "usable_tokens": facts.usable_blocks * facts.block_size,
        "free_tokens": gate.ledger.free_blocks * facts.block_size,
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
