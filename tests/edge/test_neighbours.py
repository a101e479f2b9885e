"""A pool with room takes over who waits for another one of the same model."""

from __future__ import annotations

import asyncio
from functools import partial

from harness import Client
from inside import until
from several_engines import Fake, answered, ask, before, sent

from kvgate.edge.gateway import Gateway
from kvgate.edge.housekeeping import probe
from kvgate.edge.tenants import tenant_rules
from kvgate.edge.upstreams.upstream import Upstream


def holds(upstream: Upstream, blocks: int) -> bool:
    return upstream.gate.ledger.reserved_blocks == blocks


async def filled(gateway: Gateway, tokens: int = 80) -> list[Client]:
    """A client in each pool, in the order of the pools."""
    clients = []
    for upstream in gateway.upstreams:
        clients.append(await sent(gateway, ask(tokens=tokens)))
        await until(partial(holds, upstream, tokens))
    return clients


async def waits(gateway: Gateway, at: int, data: bytes) -> Client:
    """A client that waits in the line of pool number `at`."""
    line = gateway.upstreams[at].gate.line
    before_it = len(line)
    client = await sent(gateway, data)
    await until(lambda: len(line) == before_it + 1)
    return client


def lines(gateway: Gateway) -> list[int]:
    return [len(upstream.gate.line) for upstream in gateway.upstreams]


async def test_who_waits_for_one_pool_goes_to_the_one_that_has_room_first() -> None:
    engines = [Fake(), Fake()]
    async with before(engines, max_wait=10.0) as gateway:
        first, second = await filled(gateway)
        waiting = await waits(gateway, 0, ask(tokens=60))
        await asyncio.sleep(0.02)
        engines[1].go.set()
        assert (await second.response()).json["from"] == engines[1].port
        answer = await waiting.response()
        assert (answer.status, answer.json["from"]) == (200, engines[1].port)
        assert int(answer.header("x-kvgate-wait-ms") or 0) >= 20
        assert gateway.snapshot()["counters"]["moves"] == 1
        assert engines[0].held == 80  # and has not been asked for it
        assert len(engines[0].generations) == 1
        engines[0].go.set()
        assert (await first.response()).status == 200


async def test_the_longest_wait_goes_first_and_those_that_do_not_fit_stay() -> None:
    engines = [Fake(), Fake(), Fake()]
    async with before(engines, max_wait=10.0) as gateway:
        clients = await filled(gateway)
        large = await waits(gateway, 0, ask(tokens=85))
        small = await waits(gateway, 1, ask(tokens=5 + 10))
        late = await waits(gateway, 2, ask(tokens=84))
        assert lines(gateway) == [1, 1, 1]
        engines[2].go.set()
        # Its own line comes first; then nobody waits there, and of the others the one who came first.
        for client in (late, large, small):
            assert (await client.response()).json["from"] == engines[2].port
        assert lines(gateway) == [0, 0, 0]
        assert [len(engine.generations) for engine in engines] == [1, 1, 4]
        for engine in engines:
            engine.go.set()
        for client in clients:
            assert (await client.response()).status == 200


async def test_a_client_that_left_is_not_moved_and_takes_nothing() -> None:
    engines = [Fake(), Fake()]
    async with before(engines, max_wait=10.0) as gateway:
        clients = await filled(gateway)
        gone = await waits(gateway, 0, ask(tokens=60))
        await gone.close()
        await until(lambda: lines(gateway) == [0, 0])
        engines[1].go.set()
        await clients[1].response()
        await until(lambda: gateway.upstreams[1].gate.ledger.reserved_blocks == 0)
        assert gateway.snapshot()["counters"]["moves"] == 0
        engines[0].go.set()
        await clients[0].response()


async def test_a_pool_of_another_model_takes_nobody() -> None:
    engines = [Fake(("a",)), Fake(("b",))]
    async with before(engines, max_wait=10.0) as gateway:
        other = await sent(gateway, ask("b", tokens=80))
        await until(lambda: engines[1].held == 80)
        first = await sent(gateway, ask("a", tokens=80))
        await until(lambda: engines[0].held == 80)
        waiting = await waits(gateway, 0, ask("a", tokens=60))
        engines[1].go.set()
        assert (await other.response()).status == 200
        await asyncio.sleep(0.05)
        assert lines(gateway) == [1, 0]
        engines[0].go.set()
        assert [(await client.response()).status for client in (first, waiting)] == [200, 200]


async def test_what_a_tenant_may_not_have_there_it_does_not_get_there() -> None:
    engines = [Fake(), Fake()]
    rules = tenant_rules([{"name": "small", "keys": ["k"], "ceiling": 50}])
    async with before(engines, max_wait=10.0, tenants=rules) as gateway:
        mine = "Authorization: Bearer k\r\n"
        held = [await sent(gateway, ask(tokens=45, headers=mine)) for _ in engines]
        await until(lambda: [engine.held for engine in engines] == [45, 45])
        waiting = await waits(gateway, 0, ask(tokens=30, headers=mine))
        # There is room for it at both, and none of it is this tenant's, whatever comes and goes.
        other = await sent(gateway, ask(tokens=10))
        await until(lambda: sum(engine.held for engine in engines) == 100)
        await other.close()
        await until(lambda: sum(engine.held for engine in engines) == 90)
        await asyncio.sleep(0.05)
        assert lines(gateway) == [1, 0]
        engines[1].go.set()
        assert (await held[1].response()).status == 200
        assert (await waiting.response()).json["from"] == engines[1].port
        engines[0].go.set()
        assert (await held[0].response()).status == 200


async def test_a_pool_that_is_there_again_takes_over_at_the_next_look() -> None:
    engines = [Fake(), Fake()]
    async with before(engines, max_wait=30.0) as gateway:
        gateway.upstreams[1].pool.is_up = False
        first = await sent(gateway, ask(tokens=80))
        await until(lambda: engines[0].held == 80)
        waiting = await waits(gateway, 0, ask(tokens=60))
        engines[1].go.set()
        answer = await waiting.response()  # the housekeeping has found it up again
        assert (answer.status, answer.json["from"]) == (200, engines[1].port)
        engines[0].go.set()
        assert (await first.response()).status == 200


async def test_one_pool_alone_pays_nothing_for_it() -> None:
    async with before([Fake()]) as gateway:
        assert gateway.keeper.on_room is None


async def test_a_pool_whose_requests_fail_draws_nobody() -> None:
    engines = [Fake(), Fake()]
    async with before(engines, max_wait=10.0) as gateway:
        clients = await filled(gateway)
        waiting = await waits(gateway, 0, ask(tokens=60))
        engines[1].status = b"500 Internal Server Error"
        engines[1].go.set()
        assert (await clients[1].response()).status == 500
        await asyncio.sleep(1.2)  # nor does the housekeeping
        assert lines(gateway) == [1, 0]
        engines[1].status = b"200 OK"
        assert (await answered(gateway, ask(tokens=5))).status == 200  # it is well again
        assert (await waiting.response()).json["from"] == engines[1].port
        engines[0].go.set()
        assert (await clients[0].response()).status == 200


async def test_a_pool_that_comes_back_with_another_model_takes_nobody_who_asked_for_the_old_one() -> None:
    engines = [Fake(), Fake()]
    async with before(engines, max_wait=10.0) as gateway:
        clients = await filled(gateway)
        waiting = await waits(gateway, 0, ask(tokens=60))
        engines[1].names = ("other",)
        await probe(gateway, gateway.engines)
        engines[1].go.set()
        assert (await clients[1].response()).status == 200
        await asyncio.sleep(1.2)
        assert lines(gateway) == [1, 0]
        engines[0].go.set()
        answers = [(await client.response()).json["from"] for client in (clients[0], waiting)]
        assert answers == [engines[0].port] * 2


async def test_the_higher_class_is_taken_over_before_the_longer_wait() -> None:
    engines = [Fake(("a",)), Fake(("b",)), Fake(("a", "b"))]
    rules = tenant_rules([{"name": "high", "keys": ["k"], "priority": 1}])
    async with before(engines, max_wait=10.0, tenants=rules) as gateway:
        clients = [await sent(gateway, ask("a", tokens=80))]
        await until(lambda: engines[0].held == 80)
        clients.append(await sent(gateway, ask("b", tokens=80)))
        await until(lambda: engines[1].held == 80)
        clients.append(await sent(gateway, ask("a", tokens=80)))
        await until(lambda: engines[2].held == 80)
        low = await waits(gateway, 0, ask("a", tokens=60))
        high = await waits(gateway, 1, ask("b", tokens=60, headers="Authorization: Bearer k\r\n"))
        engines[2].go.set()
        for client in (clients[2], high, low):
            assert (await client.response()).json["from"] == engines[2].port
        assert b"bearer k" in engines[2].generations[1][0]
        for engine in engines:
            engine.go.set()
        for client in clients[:2]:
            await client.response()
