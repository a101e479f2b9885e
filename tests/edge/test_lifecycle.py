"""A reservation lives exactly as long as the engine may hold memory for it, however it ends."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator

import pytest
from harness import Client, Stack, payload, request
from whole_pool import WHOLE, held

LONG = {"chunks": 400, "interval_ms": 50, "prompt_tokens": 10}


@pytest.fixture(scope="module")
def narrow() -> Iterator[Stack]:
    """Room for one request that takes everything; others may wait."""
    started = Stack("--max-wait", "20", "--abort-grace", "0.02", total_blocks=100)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def strict() -> Iterator[Stack]:
    """Room for one; nobody waits; a cut request is held for another second."""
    started = Stack("--abort-grace", "1", total_blocks=100)
    yield started
    started.stop()


async def engine_is(stack: Stack, within: float = 1.0, **wanted: int) -> None:
    end = time.monotonic() + within
    while True:
        stats = await asyncio.to_thread(stack.engine.stats)
        if all(stats[name] == value for name, value in wanted.items()):
            return
        assert time.monotonic() < end, f"{[stats[n] for n in wanted]} is not {wanted}"
        await asyncio.sleep(0.01)


async def test_200_streams_cut_after_3_chunks_release_all_they_held(narrow: Stack) -> None:
    """FC-14."""
    for _ in range(200):
        client = await Client.connect(narrow.port)
        client.send(request(body=payload(**WHOLE), script=LONG | {"interval_ms": 1}))
        await client.events(3)
        assert client.current.status == 200
        client.cut()
    normal = await narrow.fetch(request(body=payload(**WHOLE), script={"prompt_tokens": 10}))
    assert normal.status == 200
    assert int(normal.header("x-kvgate-wait-ms") or 0) < 1000
    await narrow.assert_idle()


async def test_waiters_that_leave_are_forgotten_and_the_others_are_served_in_order(narrow: Stack) -> None:
    """FC-18."""
    await asyncio.to_thread(narrow.engine.stats, reset=True)
    async with held(narrow, LONG) as holder:
        waiters: list[Client] = []
        for number in range(50):
            client = await Client.connect(narrow.port)
            client.send(request(body=payload(**WHOLE, user=str(number)), script={"prompt_tokens": 10}))
            await narrow.until(waiting=number + 1)
            waiters.append(client)
        leaving = set(random.Random(18).sample(range(50), 25))
        for number in leaving:
            waiters[number].cut()
        await narrow.until(waiting=25)
        holder.cut()
        staying = [n for n in range(50) if n not in leaving]
        answers = [await waiters[n].response() for n in staying]
    assert {a.status for a in answers} == {200}
    bodies = [json.loads(r["body"]) for r in await asyncio.to_thread(narrow.engine.generations_seen)]
    assert [int(b["user"]) for b in bodies if "user" in b] == staying
    for client in waiters:
        await client.close()
    await narrow.assert_idle()


async def test_a_waiter_that_leaves_as_it_is_granted_passes_the_room_on(narrow: Stack) -> None:
    """FC-18: the same instant, many times."""
    for turn in range(30):
        async with held(narrow, LONG) as holder:
            leaver = await Client.connect(narrow.port)
            leaver.send(request(body=payload(**WHOLE), script=LONG))
            await narrow.until(waiting=1)
            stayer = await Client.connect(narrow.port)
            stayer.send(request(body=payload(False, **WHOLE), script={"prompt_tokens": 10}))
            await narrow.until(waiting=2)
            holder.cut()
            await asyncio.sleep(0.015 + 0.0005 * turn)  # around the abort grace
            leaver.cut()
            assert (await stayer.response()).status == 200
            await stayer.close()
    await narrow.assert_idle()


async def test_a_call_without_a_stream_is_cancelled_when_its_client_leaves(strict: Stack) -> None:
    """FC-20: the engine's connection is closed within a second; only after that comes the release."""
    client = await Client.connect(strict.port)
    client.send(request(body=payload(False, **WHOLE), script=LONG))
    await engine_is(strict, open=1)
    client.cut()
    await engine_is(strict, open=0)
    pool = await asyncio.to_thread(strict.pool)
    assert (pool["reserved_blocks"], pool["live"]) == (90, 1)
    await strict.assert_idle()


async def test_a_request_id_of_the_client_is_not_a_key_of_the_books(stack: Stack) -> None:
    """FC-23: the same id on two live requests, and again right after an abort."""
    same = "X-Request-Id: abc\r\n"
    first, second, third = [await Client.connect(stack.port) for _ in range(3)]
    for client in (first, second):
        client.send(request(body=payload(), script=LONG, headers=same))
        await client.events(1)
    await stack.until(live=2, reserved_blocks=50)
    first.cut()
    third.send(request(body=payload(), script=LONG, headers=same))
    await third.events(1)
    await stack.until(live=2, reserved_blocks=50)
    short = await stack.fetch(request(script={"prompt_tokens": 10}, headers=same))
    assert short.status == 200
    await stack.until(live=2, reserved_blocks=50)
    second.cut()
    third.cut()
    await stack.assert_idle()


async def test_the_room_of_a_cut_request_is_kept_for_the_grace_of_the_engine(strict: Stack) -> None:
    """FC-26: this engine goes on after the client has left."""
    client = await Client.connect(strict.port)
    script = LONG | {"fault": "ignore_disconnect", "chunks": 20}
    client.send(request(body=payload(**WHOLE), script=script))
    await client.events(2)
    client.cut()
    cut_at = time.monotonic()
    await engine_is(strict, open=0, busy=1)
    refused = await strict.fetch(request(body=payload(max_tokens=1)))
    assert (refused.status, refused.code) == (429, "kv_capacity")
    await strict.until(reserved_blocks=0)
    assert time.monotonic() - cut_at >= 0.95
    await engine_is(strict, busy=0)
    await strict.assert_idle()


@pytest.mark.parametrize("fault", ["hang_before_headers", "hang_mid"])
async def test_a_half_closed_client_does_not_keep_the_only_slot(strict: Stack, fault: str) -> None:
    """FC-27: during a silent prefill and in a silent stream."""
    client = await Client.connect(strict.port)
    client.send(request(body=payload(**WHOLE), script=LONG | {"fault": fault}))
    await engine_is(strict, busy=1)
    client.transport.write_eof()
    await engine_is(strict, within=2.5, busy=0, open=0)
    await strict.assert_idle()
    await client.close()


async def test_a_client_that_stops_reading_does_not_keep_its_room(strict: Stack) -> None:
    """FC-27: it holds the connection, but takes nothing of a large answer."""
    client = await Client.connect(strict.port)
    script = {"chunks": 200, "chunk_bytes": 200_000, "prompt_tokens": 10}
    client.send(request(body=payload(**WHOLE), script=script))
    client.transport.pause_reading()
    await strict.until(within=2, reserved_blocks=90)
    await strict.until(within=4, reserved_blocks=0)
    client.cut()
    await strict.assert_idle()


async def test_a_client_that_leaves_during_the_count_leaves_nothing(strict: Stack) -> None:
    client = await Client.connect(strict.port)
    client.send(request(body=payload(**WHOLE), script={"count_fault": "hang"}))
    await asyncio.sleep(0.05)
    client.cut()
    await strict.assert_idle()
