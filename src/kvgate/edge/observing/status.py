"""The figures of a gateway at one moment, as plain values: what `/status` and `/metrics` are made of."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from kvgate.core.records import Ending, Reason
from kvgate.core.tenancy import DEFAULT_NAME
from kvgate.edge import clock
from kvgate.edge.upstreams.upstream import Upstream

if TYPE_CHECKING:
    from kvgate.edge.gateway import Gateway


def snapshot(gateway: Gateway) -> dict[str, Any]:
    """Reads only. The counters are sums over all pools."""
    first = gateway.upstreams[0]
    gates = [upstream.gate for upstream in gateway.upstreams]
    refusals: Counter[Reason] = sum((gate.refusals for gate in gates), Counter())
    releases: Counter[Ending] = sum((gate.releases for gate in gates), Counter())
    return {
        "uptime_seconds": round(clock.now() - gateway.started, 3),
        "ready": gateway.ready,
        "draining": gateway.is_draining,
        "engine_up": any(upstream.is_up for upstream in gateway.upstreams),
        "upstream": first.url,
        "engine_error": next(
            (u.pool.last_error for u in gateway.engines if u.pool.last_error is not None), None
        ),
        "client_connections": len(gateway.clients),
        "connections_max": gateway.connections_max,
        "body_bytes_held": gateway.bodies.held,
        "engine_connections": sum(upstream.pool.open_connections for upstream in gateway.engines),
        "loop_lag": gateway.loop_lag.snapshot(),
        "tenants": [rule.name for rule in gateway.settings.tenants],
        "pools": [pool(upstream) for upstream in gateway.upstreams],
        "counters": {
            "requests": gateway.requests,
            "admissions": sum(gate.admissions for gate in gates),
            "refusals": {reason.value: n for reason, n in refusals.items()},
            "releases": {ending.value: n for ending, n in releases.items()},
            "double_releases": sum(gate.ledger.double_releases for gate in gates),
            "moves": gateway.neighbours.moved,
        },
    }


def pool(upstream: Upstream) -> dict[str, Any]:
    """One pool's."""
    facts, gate = upstream.facts, upstream.gate
    return {
        "engine": upstream.engine.name,
        "upstream": upstream.label,
        "url": upstream.url,
        "rank": upstream.rank,
        "up": upstream.is_up,
        "error": upstream.pool.last_error if upstream.is_sized else upstream.unsized_why,
        "models": sorted(upstream.models or ()),
        "total_blocks": facts.total_blocks if upstream.is_sized else 0,
        "usable_blocks": gate.ledger.usable_blocks,
        "reserved_blocks": gate.ledger.reserved_blocks,
        "free_blocks": gate.ledger.free_blocks,
        "block_size": facts.block_size,
        "held_by": {name or DEFAULT_NAME: n for name, n in gate.line.shares.held().items()},
        "live": len(gate.ledger),
        "lingering": upstream.keeper.lingering,
        "waiting": len(gate.line),
        "context": facts.context,
        "max_seqs": facts.max_seqs,
        "reserved_seqs": gate.ledger.reserved_seqs,
        "safety_fraction": facts.safety_fraction,
        "admissions": gate.admissions,
        "warnings": upstream.warnings,
        "drift": None if upstream.drift is None else upstream.drift.snapshot(),
        "counting": upstream.counter.snapshot(),
    }
