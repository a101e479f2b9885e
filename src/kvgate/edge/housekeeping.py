"""What the gateway does now and then: end what is silent, close what is idle, see whether the engine is back.

Promises: no turn of it holds the loop for longer than a few hundred connections take; silence is
judged only by a loop that was awake to hear.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvgate.edge.relay.heads import request_head
from kvgate.edge.relay.pool import EngineUnavailable

if TYPE_CHECKING:
    from kvgate.edge.gateway import Gateway

SWEEP_SECONDS = 1.0
PROBE_SECONDS = 2.0
PROBE_TIMEOUT = 2.0
# Looking at one connection takes about a microsecond: a turn stays under a millisecond.
CLIENTS_PER_TURN = 256


async def keep_house(gateway: Gateway) -> None:
    """Runs until it is cancelled."""
    loop = gateway.loop
    swept = probed = loop.time()
    while True:
        period = _period(gateway)
        await asyncio.sleep(period)
        now = loop.time()
        was_held_up = now - swept > 2 * period
        swept = now
        if was_held_up:
            # What seems to be silence may lie unread in a socket: read it first, then judge.
            continue
        await _sweep(gateway, now)
        gateway.pool.sweep()
        if len(gateway.gate.ledger) == 0:
            gateway.gate.ledger.recount()
        if gateway.collector is not None:
            gateway.collector.sweep(is_idle=len(gateway.gate.ledger) == 0)
        if not gateway.pool.is_up and now - probed >= PROBE_SECONDS:
            probed = now
            await probe(gateway)
            # A slow engine has not held up the loop.
            swept = loop.time()


async def _sweep(gateway: Gateway, now: float) -> None:
    for count, client in enumerate(list(gateway.clients), 1):
        client.sweep(now)
        if count % CLIENTS_PER_TURN == 0:
            await asyncio.sleep(0)


async def probe(gateway: Gateway) -> None:
    """Set `pool.is_up` by asking the engine for its models."""
    pool = gateway.pool
    request = request_head(
        b"GET", pool.prefix + b"/v1/models", pool.authority, [], body_bytes=0, peer=b"127.0.0.1"
    )
    try:
        async with asyncio.timeout(PROBE_TIMEOUT):
            await pool.fetch(request)
    except (EngineUnavailable, TimeoutError):
        pool.is_up = False


def _period(gateway: Gateway) -> float:
    settings = gateway.settings
    shortest = min(settings.engine_idle_timeout, settings.client_timeout, settings.client_idle_timeout)
    return min(SWEEP_SECONDS, shortest / 4)
