"""The real llama.cpp, unified and split: found as documented, and a storm through a gateway that found
its own sizes ends no stream."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvgate.config import Settings, UpstreamSettings
from kvgate.core.records import PoolFacts
from kvgate.edge.embedded import EmbeddedEngine
from kvgate.edge.gateway import Gateway
from kvgate.edge.relay.pool import EnginePool
from kvgate.edge.upstreams import sizing
from kvgate.edge.upstreams.discovery import Found, Given, discover, pool_fetch
from kvgate.lab.tiny_gguf import write_tiny_gguf

CELLS, SLOTS = 2048, 8
UNIFIED = 1024
STREAMS, PROMPT, CAP = 8, "x" * 70, 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def unified(model: Path) -> Iterator[EmbeddedEngine]:
    with EmbeddedEngine.start(cells=UNIFIED, slots=SLOTS, model=model) as running:
        yield running


@pytest.fixture(scope="module")
def split(model: Path) -> Iterator[EmbeddedEngine]:
    with EmbeddedEngine.start(cells=CELLS, slots=SLOTS, unified=False, model=model) as running:
        yield running


async def found_at(url: str, given: Given | None = None) -> Found:
    pool = EnginePool(url, asyncio.get_running_loop(), connect_timeout=5, idle_timeout=5)
    try:
        return await discover(pool_fetch(pool), None, given)
    finally:
        pool.close()


async def one_stream(client: httpx.AsyncClient, number: int, cap: int) -> bool:
    """Whether it came whole: no error in it, and its proper end."""
    body = {"prompt": f"{number:02}{PROMPT}", "max_tokens": cap, "stream": True, "ignore_eos": True}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        lines = [line async for line in answer.aiter_lines() if line]
    return lines[-1] == "data: [DONE]" and not any('"error"' in line for line in lines)


async def storm(url: str, cap: int) -> int:
    """Streams that died, of those sent at once."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        whole = await asyncio.gather(*(one_stream(client, n, cap) for n in range(STREAMS)))
    return whole.count(False)


async def gated_storm(engine: EmbeddedEngine, cap: int, **given: Any) -> tuple[int, dict[str, Any]]:
    """Streams that died behind a gateway that was told `given` and found the rest, and its pool."""
    upstream = UpstreamSettings(engine.url, **given)
    gateway = Gateway(Settings(upstreams=(upstream,), listen_port=0, max_wait=100.0))
    await gateway.start()
    looking = asyncio.create_task(look_again(gateway))
    try:
        dead = await storm(f"http://127.0.0.1:{gateway.port}", cap)
        return dead, gateway.snapshot()["pools"][0]
    finally:
        looking.cancel()
        await gateway.stop()


async def look_again(gateway: Gateway) -> None:
    """More often than it does by itself: the storm is short."""
    while True:
        await sizing.look(gateway.upstreams)
        await asyncio.sleep(0.1)


async def test_a_unified_cache_is_found_as_its_lower_bound_and_a_storm_ends_no_stream(
    unified: EmbeddedEngine,
) -> None:
    found = await found_at(unified.url)

    # One slot's context is the whole cache here; no more than 0.90 of it may be reserved.
    assert found.facts == PoolFacts(
        UNIFIED, 1, 921, max_seqs=SLOTS, engine="llamacpp", engine_context=UNIFIED
    )
    assert "unified_or_split" in {f.code for f in found.warnings}
    assert await storm(unified.url, CAP) > 0, "without the gate some die"
    dead, pool = await gated_storm(unified, CAP)

    assert (dead, pool["total_blocks"], pool["context"]) == (0, UNIFIED, 921)
    # Its slots were seen at work, and never more in use than was reserved.
    assert pool["drift"]["looks"] > 0
    assert (pool["drift"]["overuses"], pool["drift"]["fraction"]) == (0, 0.90)


async def test_a_split_cache_is_found_as_one_slot_and_as_all_of_them_when_the_size_is_given(
    split: EmbeddedEngine,
) -> None:
    bound = await found_at(split.url)
    given = await found_at(split.url, Given(total_blocks=CELLS))

    assert bound.facts is not None
    assert (bound.facts.total_blocks, bound.facts.max_seqs) == (CELLS // SLOTS, SLOTS)
    assert given.facts == PoolFacts(
        CELLS, 1, CELLS // SLOTS, max_seqs=SLOTS, engine="llamacpp", engine_context=CELLS // SLOTS
    )
    assert not {"unified_or_split", "unified_cache"} & {f.code for f in given.warnings}
    for said, blocks in (({}, CELLS // SLOTS), ({"total_blocks": CELLS}, CELLS)):
        dead, pool = await gated_storm(split, 100, **said)
        assert (dead, pool["total_blocks"]) == (0, blocks)
