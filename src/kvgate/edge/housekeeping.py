"""What the gateway does now and then: end what is silent, close what is idle, see what the engines are.

Promises: no turn of it holds the loop for longer than a few hundred connections take; silence is
judged only by a loop that was awake to hear.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvgate.edge.relay.heads import request_head
from kvgate.edge.relay.pool import EngineUnavailable
from kvgate.edge.upstreams import sizing
from kvgate.edge.upstreams.drift import PERIOD_SECONDS
from kvgate.edge.upstreams.models import PATH, read_models
from kvgate.edge.upstreams.upstream import PINNED_BY_HEADER, Upstream

if TYPE_CHECKING:
    from kvgate.edge.gateway import Gateway

SWEEP_SECONDS = 1.0
PROBE_SECONDS = 2.0
PROBE_TIMEOUT = 2.0
# Between two looks at the models of engines that are up: adapters come and go while they run.
MODELS_SECONDS = 15.0
# Looking at one connection takes about a microsecond: a turn stays under a millisecond.
CLIENTS_PER_TURN = 256


async def keep_house(gateway: Gateway) -> None:
    """Runs until it is cancelled."""
    loop = gateway.loop
    swept = loop.time()
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
        is_idle = _sweep_pools(gateway)
        gateway.neighbours.look()
        if gateway.collector is not None:
            gateway.collector.sweep(is_idle=is_idle)


async def keep_known(gateway: Gateway) -> None:
    """Asks again those engines that were away, and now and then all for their models; runs until it is
    cancelled. A task of its own: an engine that hangs must not hold up the sweeps."""
    listed = gateway.loop.time()
    while True:
        await asyncio.sleep(PROBE_SECONDS)
        due = [each for each in gateway.engines if each.was_away or not each.is_up]
        now = gateway.loop.time()
        if gateway.fleet.only is None and now - listed >= MODELS_SECONDS:
            due, listed = gateway.engines, now
        if due:
            await probe(gateway, due)


async def _sweep(gateway: Gateway, now: float) -> None:
    for count, client in enumerate(list(gateway.clients), 1):
        client.sweep(now)
        if count % CLIENTS_PER_TURN == 0:
            await asyncio.sleep(0)


def _sweep_pools(gateway: Gateway) -> bool:
    """True where nothing is held in any pool."""
    is_idle = True
    for upstream in gateway.upstreams:
        upstream.pool.sweep()
        if not upstream.pool.is_up:
            upstream.was_away = True
        if len(upstream.gate.ledger) == 0:
            upstream.gate.ledger.recount()
        else:
            is_idle = False
    return is_idle


async def probe(gateway: Gateway, engines: Iterable[Upstream]) -> None:
    """See which of `engines` can be reached, and what they serve; all at once."""
    await asyncio.gather(*(_probe(gateway, upstream) for upstream in engines))
    gateway.fleet.regroup()


async def _probe(gateway: Gateway, upstream: Upstream) -> None:
    pool = upstream.pool
    request = request_head(
        b"GET", pool.prefix + PATH, pool.authority, pool.access.own, body_bytes=0, peer=b"127.0.0.1"
    )
    try:
        async with asyncio.timeout(PROBE_TIMEOUT):
            answer = await pool.fetch(request)
    except (EngineUnavailable, TimeoutError):
        pool.is_up = False
        upstream.was_away = True
        return
    pool.is_up = True
    ranks = [each for each in gateway.upstreams if each.given is upstream.given]
    objects = read_models(answer.body) if answer.status == 200 else []
    if objects:
        for each in ranks:
            each.list_models(objects)
    if not upstream.is_sized or upstream.was_away:
        await _size(gateway, ranks)
    upstream.was_away = False


async def _size(gateway: Gateway, ranks: list[Upstream]) -> None:
    first = ranks[0]
    if first.is_sized and first.found_name is None:
        return  # the operator has said everything
    try:
        found = await sizing.find(gateway.settings, ranks)
    except ValueError as wrong:  # the operator's own files
        for each in ranks:
            each.unsized_why = str(wrong)
        return
    for each in ranks:
        each.use(gateway.settings, gateway.keys)
    several = found.ranks > 1 and found.engine in PINNED_BY_HEADER and first.given.ranks is None
    if found.facts is not None and several and first.rank is None:
        gateway.expect_ranks(first, found.ranks)


async def keep_watch(gateway: Gateway) -> None:
    """Compares the books with what the engines show; runs until it is cancelled."""
    while True:
        await asyncio.sleep(PERIOD_SECONDS)
        if gateway.settings.watch_engine_metrics:
            await sizing.look(gateway.upstreams)


def _period(gateway: Gateway) -> float:
    settings = gateway.settings
    shortest = min(settings.engine_idle_timeout, settings.client_timeout, settings.client_idle_timeout)
    return min(SWEEP_SECONDS, shortest / 4)
