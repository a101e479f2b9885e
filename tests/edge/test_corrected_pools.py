"""What follows the size of a pool: the ceilings of tenants at once, and what a foreign client leaves over.

Before scripted engines whose pages the test writes, and before the real llama.cpp.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import Response, fetch
from inside import settle, until
from several_engines import Fake, answered, ask, before, sent
from test_upstreams import NOTHING_GIVEN

from engine_pages import llamacpp, pages, vllm
from kvgate.config import Settings, at
from kvgate.core.correction import KEPT
from kvgate.core.tenancy import ClassRule
from kvgate.edge.embedded import EmbeddedEngine
from kvgate.edge.gateway import Gateway
from kvgate.edge.housekeeping import probe
from kvgate.edge.tenants import tenant_rules
from kvgate.edge.upstreams import sizing
from kvgate.lab.tiny_gguf import write_tiny_gguf
from kvgate.wire.engines.found import Page

HALF = tenant_rules([{"name": "half", "keys": ["k1"], "ceiling": 0.5}, {"name": "default", "ceiling": 0.2}])
K1 = "Authorization: Bearer k1\r\n"
# 200 blocks of one token: 180 usable, 90 for `half`.
SMALL = {"num_gpu_blocks": "201", "block_size": "1", "kv_cache_size_tokens": "201"}


def small(blocks: int = 201) -> dict[str, Page]:
    labels = SMALL | {"num_gpu_blocks": str(blocks), "kv_cache_size_tokens": str(blocks)}
    return vllm(labels, context=100)


def preempted(engine: Fake, times: int) -> None:
    text = engine.pages["/metrics"].text
    text = re.sub(r"(vllm:kv_cache_usage_perc\{.*\}) .*", r"\1 0.0", text)
    text = re.sub(r"(vllm:num_preemptions_total\{.*\}) .*", rf"\1 {times}.0", text)
    engine.pages["/metrics"] = Page(200, text)


def ceilings(gateway: Gateway) -> tuple[int | None, int | None]:
    tenants = gateway.upstreams[0].tenants
    return tenants.of([(b"authorization", b"Bearer k1")])[0].ceiling, tenants.of([])[0].ceiling


async def looked(gateway: Gateway, engine: Fake, *preemptions: int) -> None:
    for times in preemptions:
        preempted(engine, times)
        await sizing.look(gateway.upstreams)


async def test_ceilings_follow_a_correction_at_once_and_what_waits_is_let_in_by_the_new_ones() -> None:
    engine = Fake(pages=small())
    options = NOTHING_GIVEN | {"watch_engine_metrics": True, "tenants": HALF, "max_wait": 30.0}
    async with before([engine], **options) as gateway:
        upstream = gateway.upstreams[0]
        assert (upstream.facts.usable_blocks, ceilings(gateway)) == (180, (90, 36))
        holding = await sent(gateway, ask("tiny", tokens=50, headers=K1))
        await until(lambda: engine.held == 50)
        waiting = await sent(gateway, ask("tiny", tokens=45, headers=K1))
        await until(lambda: len(upstream.gate.line) == 1)
        await looked(gateway, engine, 0, 1, 2)
        assert (upstream.facts.usable_blocks, ceilings(gateway)) == (160, (80, 32))
        (account,) = upstream.gate.line.shares._accounts.values()
        assert account.tenant.ceiling == 80
        # The operator's fraction is there again: both fit below the ceiling of then.
        assert upstream.drift is not None
        upstream.drift.correction.own = 0.96
        upstream.drift.correction.ceiling = 0.96
        await looked(gateway, engine, 2)
        assert ceilings(gateway) == (96, 38)
        await until(lambda: engine.held == 95)
        engine.go.set()
        assert [(await client.response()).status for client in (holding, waiting)] == [200, 200]


async def test_what_a_ceiling_holds_back_for_now_is_busy_and_not_never() -> None:
    engine = Fake(pages=small())
    options = NOTHING_GIVEN | {"watch_engine_metrics": True, "tenants": HALF}
    async with before([engine], **options) as gateway:
        await looked(gateway, engine, 0, 1, 2)
        assert ceilings(gateway) == (80, 32)
        for tokens, status, code in ((85, 429, "tenant_limit"), (91, 413, "kv_capacity_exceeded")):
            refused = await answered(gateway, ask("tiny", tokens=tokens, headers=K1))
            assert (refused.status, refused.code) == (status, code)
        assert refused.json["error"]["usable_tokens"] == 90
        assert refused.json["error"]["output_cap_that_fits"] == 88


async def test_ceilings_floors_and_keys_that_no_rule_names_follow_an_engine_that_restarts() -> None:
    engine = Fake(pages=small())
    engine.go.set()
    options = NOTHING_GIVEN | {"tenants": HALF, "tenant_per_key": True, "classes": (ClassRule(0, 0.5),)}
    async with before([engine], **options) as gateway:
        upstream = gateway.upstreams[0]
        assert (await answered(gateway, ask("tiny", tokens=30, headers="x-api-key: k9\r\n"))).status == 200
        stranger = next(n for n in upstream.gate.line.shares._accounts if n.startswith("key-"))
        for blocks, half, other in ((101, 45, 18), (401, 180, 72)):
            engine.pages = small(blocks)
            upstream.was_away = True
            await probe(gateway, gateway.engines)
            assert ceilings(gateway) == (half, other)
            assert upstream.gate.line.shares._accounts[stranger].tenant.ceiling == other


@pytest.mark.parametrize(("fraction", "usable"), [(0.95, 190), (0.8, 160)])
async def test_a_reload_gives_another_fraction_to_a_pool_that_was_corrected(
    fraction: float, usable: int
) -> None:
    engine = Fake(pages=small())
    async with before([engine], **(NOTHING_GIVEN | {"watch_engine_metrics": True})) as gateway:
        await looked(gateway, engine, 0, 1, 2)
        gateway.reload(replace(gateway.settings, safety_fraction=fraction))
        facts = gateway.upstreams[0].facts
        assert (facts.usable_blocks, facts.most_blocks) == (usable, usable)


# --- a foreign client


def slots(*cells: int, idle: int = 0) -> dict[str, Page]:
    busy = [{"id": n, "is_processing": True, "n_ctx": 300, "n_prompt_tokens": c} for n, c in enumerate(cells)]
    rest = [{"id": n, "is_processing": False, "n_ctx": 300} for n in range(len(cells), len(cells) + idle)]
    return pages({"/slots": busy + rest})


async def test_what_a_foreign_client_holds_is_held_back_while_it_is_there() -> None:
    engine = Fake(pages=llamacpp(300, slots=8))
    sizes = NOTHING_GIVEN | {"total_blocks": 300, "context": 200, "watch_engine_metrics": True}
    async with before([engine], **sizes) as gateway:
        upstream = gateway.upstreams[0]
        holding = await sent(gateway, ask("tiny", tokens=120))
        await until(lambda: engine.held == 120)
        # Ours has 10 cells so far, two others have 95: 105 in all, and 120 are reserved.
        engine.pages |= slots(10, 40, 55, idle=5)
        for _ in range(2):
            await sizing.look(gateway.upstreams)
        pool = gateway.snapshot()["pools"][0]
        assert (pool["drift"]["foreign_seqs"], pool["drift"]["foreign_blocks"]) == (2, 95)
        assert pool["drift"]["excess_blocks"] == 0
        assert pool["usable_blocks"] == 270 - 95
        refused = await answered(gateway, ask("tiny", tokens=60))
        assert (refused.status, refused.code) == (429, "kv_capacity")
        # They grow, and then have nearly everything; nothing is "never" for that.
        engine.pages |= slots(12, 90, 195, idle=5)
        await sizing.look(gateway.upstreams)
        pool = gateway.snapshot()["pools"][0]
        assert (pool["usable_blocks"], pool["reserved_blocks"], pool["free_blocks"]) == (120, 120, 0)
        assert upstream.facts.usable_blocks == 0
        assert (await answered(gateway, ask("tiny", tokens=10))).code == "kv_capacity"
        assert (await answered(gateway, ask("tiny", tokens=199))).code == "kv_capacity"
        # They have gone.
        engine.pages |= slots(15, idle=7)
        engine.go.set()
        assert (await holding.response()).status == 200
        engine.pages |= slots(idle=8)
        assert upstream.drift is not None
        await sizing.look(gateway.upstreams)
        assert upstream.facts.usable_blocks == 0  # they may come back
        upstream.drift.correction._seen += KEPT
        await sizing.look(gateway.upstreams)
        assert upstream.facts.usable_blocks == 270
        assert (await answered(gateway, ask("tiny", tokens=199))).status == 200


async def test_a_storm_of_our_own_is_never_taken_for_a_foreign_client() -> None:
    engine = Fake(pages=llamacpp(300, slots=8))
    sizes = NOTHING_GIVEN | {"total_blocks": 300, "context": 200, "watch_engine_metrics": True}
    async with before([engine], **sizes) as gateway:
        clients = [await sent(gateway, ask("tiny", tokens=60)) for _ in range(4)]
        await until(lambda: engine.held == 240)
        for grown in range(10, 61, 10):
            engine.pages |= slots(*[grown] * 4, idle=4)
            await sizing.look(gateway.upstreams)
        drift = gateway.snapshot()["pools"][0]["drift"]
        assert (drift["overuses"], drift["foreign_seqs"], drift["fraction"]) == (0, 0, 0.9)
        engine.go.set()
        assert [(await client.response()).status for client in clients] == [200] * 4


# --- the real one

CELLS, SLOTS = 2048, 8


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEngine]:
    model: Path = write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")
    with EmbeddedEngine.start(cells=CELLS, slots=SLOTS, model=model) as running:
        yield running


async def passing_by(client: httpx.AsyncClient, started: asyncio.Semaphore, left: asyncio.Event) -> str:
    """One long stream straight to the engine, and another after it, until `left`. The errors it met."""
    errors = ""
    while not left.is_set():
        body = {"prompt": "x" * 400, "max_tokens": 200, "stream": True, "ignore_eos": True}
        async with client.stream("POST", "/v1/completions", json=body, timeout=60) as answer:
            async for line in answer.aiter_lines():
                started.release()
                errors += line if '"error"' in line else ""
                if left.is_set():
                    break
    return errors


async def test_a_foreign_client_of_a_real_llama_cpp_is_held_back_for_and_no_stream_dies(
    real: EmbeddedEngine,
) -> None:
    settings = Settings(
        upstreams=at(real.url), listen_port=0, max_wait=0.0, drain_timeout=0.0, watch_engine_metrics=False
    )
    gateway = Gateway(settings)
    await gateway.start()
    upstream, left, started = gateway.upstreams[0], asyncio.Event(), asyncio.Semaphore(0)
    assert (upstream.facts.usable_blocks, upstream.facts.max_seqs) == (int(CELLS * 0.9), SLOTS)
    assert upstream.drift is not None
    upstream.drift.is_on = True
    async with httpx.AsyncClient(base_url=real.url) as direct:
        foreign = [asyncio.create_task(passing_by(direct, started, left)) for _ in range(2)]
        try:
            for _ in range(20):
                await started.acquire()
            deepest = upstream.facts.usable_blocks
            for _ in range(40):
                await sizing.look(gateway.upstreams)
                deepest = min(deepest, upstream.facts.usable_blocks)
            seen = gateway.snapshot()["pools"][0]["drift"]
            # Two prompts of 400 letters, a token each, and 200 more tokens that each may get, of which
            # the last is never stored.
            assert seen["overuses"] > 0
            assert deepest <= CELLS * 0.9 - 2 * 599
            # What is let in now fits beside them: as much as there is, and no stream ends in an error.
            own = [asyncio.create_task(through(gateway, tokens=150)) for _ in range(SLOTS)]
            answers = await asyncio.gather(*own)
            assert {answer.status for answer in answers} <= {200, 429}
            assert 200 in {answer.status for answer in answers}
            assert all(b"Context size" not in answer.body for answer in answers)
        finally:
            left.set()
            errors = await asyncio.gather(*foreign)
            await gateway.stop()
            await settle()
    assert errors == ["", ""]


async def through(gateway: Gateway, tokens: int) -> Response:
    body: dict[str, Any] = {"model": "tiny", "prompt": [1] * 20, "max_tokens": tokens, "ignore_eos": True}
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: %d\r\n\r\n" % len(data)
    return await fetch(gateway.port, head + data, within=60.0)
