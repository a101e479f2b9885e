"""Several engines behind one gateway: models, pools, ranks, sessions, and what happens when one is gone.

The gateway runs inside the test's process before scripted engines that keep what they are sent.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import payload, request
from hypothesis import given
from hypothesis import settings as tries
from hypothesis import strategies as st
from inside import settle, until
from several_engines import COMPLETIONS, Fake, answered, ask, before, sent

from engine_pages import vllm
from kvgate.config import Settings, UpstreamSettings, at
from kvgate.core.records import Ask, PoolFacts
from kvgate.edge.gateway import Gateway
from kvgate.edge.housekeeping import probe
from kvgate.edge.observing.telemetry import Telemetry
from kvgate.edge.tenants import tenant_rules
from kvgate.edge.upstreams import sizing
from kvgate.edge.upstreams.routing import Fleet, choose
from kvgate.edge.upstreams.sizing import SizesUnknown
from kvgate.edge.upstreams.upstream import Upstream, upstreams_of
from kvgate.wire.engines.found import Page

SEEDS = itertools.count(7)


# --- models


async def test_the_model_picks_the_engine_and_an_unknown_one_does_not_exist() -> None:
    one, two = Fake(("a", "a-lora")), Fake(("b",))
    for engine in (one, two):
        engine.go.set()
    async with before([one, two]) as gateway:
        for model, engine in (("a", one), ("a-lora", one), ("b", two)):
            answer = await answered(gateway, ask(model))
            assert (answer.status, answer.json["from"]) == (200, engine.port)
        lost = await answered(gateway, ask("c"))
        assert (lost.status, lost.code, lost.json["error"]["param"]) == (404, "model_not_found", "model")
        assert lost.json["error"]["type"] == "invalid_request_error"
        assert "'c' does not exist. There are a, a-lora, b." in lost.json["error"]["message"]
        assert lost.header("x-should-retry") == "false"
        unsaid = await answered(gateway, ask(...))
        assert (unsaid.status, unsaid.code) == (400, "invalid_request")
        assert gateway.snapshot()["counters"]["refusals"] == {"model_not_found": 1, "invalid_request": 1}


async def test_one_group_takes_a_request_that_names_no_model_or_one_that_only_the_engine_knows() -> None:
    engines = [Fake(("m",)), Fake(("m", "extra"))]
    for engine in engines:
        engine.go.set()
    async with before(engines) as gateway:
        assert [(await answered(gateway, ask(name))).status for name in (..., "loaded-later")] == [200, 200]


async def test_names_that_the_operator_lists_are_the_only_ones() -> None:
    engine = Fake(("whatever",))
    engine.go.set()
    async with before([engine], lambda *_: {"models": ("mine",)}) as gateway:
        assert (await answered(gateway, ask("mine"))).status == 200
        assert (await answered(gateway, ask("whatever"))).status == 404


async def test_an_alias_is_sent_on_under_the_name_that_the_engine_knows() -> None:
    engine = Fake(("real",))
    engine.go.set()
    async with before([engine], lambda *_: {"aliases": (("gpt-4o", "real"),)}) as gateway:
        assert (await answered(gateway, ask("gpt-4o"))).status == 200
        chat = request(body=payload(False, model="gpt-4o"))
        assert (await answered(gateway, chat)).status == 200
        assert {shown["model"] for _, shown in engine.seen if "model" in shown} == {"real"}
        listed = await answered(gateway, request("/v1/models", method="GET"))
        assert [each["id"] for each in listed.json["data"]] == ["gpt-4o", "real"]


async def test_the_lists_of_all_engines_are_one_and_keep_their_objects() -> None:
    engines = [Fake(("a", "m"), {"max_model_len": 7}), Fake(("m", "z"), {"meta": {"n_ctx": 9}})]
    async with before(engines) as gateway:
        listed = (await answered(gateway, request("/v1/models", method="GET"))).json
        assert listed == {
            "object": "list",
            "data": [
                {"id": "a", "object": "model", "max_model_len": 7},
                {"id": "m", "object": "model", "max_model_len": 7},
                {"id": "z", "object": "model", "meta": {"n_ctx": 9}},
            ],
        }
        head = await answered(gateway, request("/v1/models", method="HEAD"))
        assert (head.status, head.body) == (200, b"")


async def test_a_free_request_goes_to_an_engine_of_its_model() -> None:
    one, two = Fake(("a",)), Fake(("b",))
    async with before([one, two]) as gateway:
        await answered(gateway, request("/tokenize", {"model": "b", "content": "x"}))
        await answered(gateway, request("/props", method="GET"))
    assert [head.split()[1] for head, _ in one.seen] == [b"/props"]
    assert [head.split()[1] for head, _ in two.seen] == [b"/tokenize"]


@pytest.mark.parametrize("listing", [b"{", b"[]", b'{"data": 3}', b'{"data": [1, {"id": 2}]}', b"null"])
async def test_a_list_that_cannot_be_read_names_nothing_and_says_so(listing: bytes) -> None:
    good, bad = Fake(("a",)), Fake(listing=listing)
    good.go.set()
    async with before([good, bad]) as gateway:
        assert (await answered(gateway, ask("a"))).status == 200
        lost = await answered(gateway, ask("b"))
        assert (lost.status, lost.code) == (503, "engine_unavailable")
        assert "not known yet which models e1 serve" in lost.json["error"]["message"]


# --- pools


async def test_a_request_goes_where_it_leaves_most_and_waits_where_there_is_room_first() -> None:
    engines = [Fake(), Fake()]
    async with before(engines, max_wait=10.0) as gateway:
        first, second = gateway.upstreams
        clients = [await sent(gateway, ask(tokens=60))]
        await until(lambda: first.gate.ledger.reserved_blocks == 60)
        clients.append(await sent(gateway, ask(tokens=50)))
        await until(lambda: second.gate.ledger.reserved_blocks == 50)
        clients.append(await sent(gateway, ask(tokens=35)))
        await until(lambda: second.gate.ledger.reserved_blocks == 85)
        clients.append(await sent(gateway, ask(tokens=30)))
        await until(lambda: first.gate.ledger.reserved_blocks == 90)
        clients.append(await sent(gateway, ask(tokens=20)))
        await until(lambda: len(first.gate.line) + len(second.gate.line) == 1)
        for engine in engines:
            engine.go.set()
        assert [(await client.response()).status for client in clients] == [200] * 5


async def test_refusals_name_the_pool_with_the_most_to_give() -> None:
    engines = [Fake(), Fake()]
    async with before(engines, lambda n, _: {"total_blocks": 50 * (n + 1)}) as gateway:
        never = await answered(gateway, ask(tokens=95))
        assert (never.status, never.code) == (413, "kv_capacity_exceeded")
        assert never.json["error"]["usable_tokens"] == 90


async def test_a_session_stays_with_its_pool_while_it_fits() -> None:
    engines = [Fake(), Fake(), Fake()]
    for engine in engines:
        engine.go.set()
    async with before(engines, sticky_header="X-Session-Id") as gateway:
        homes: dict[str, int] = {}
        for session in [f"s{n}" for n in range(12)] * 3:
            answer = await answered(gateway, ask(headers=f"x-session-id: {session}\r\n"))
            assert homes.setdefault(session, answer.json["from"]) == answer.json["from"]
        assert len(set(homes.values())) > 1
        home = next(e for e in engines if e.port == homes["s0"])
        home.go.clear()
        holding = await sent(gateway, ask(tokens=80, headers="x-session-id: s0\r\n"))
        await until(lambda: home.held == 80)
        answer = await answered(gateway, ask(headers="x-session-id: s0\r\n"))
        assert answer.json["from"] != home.port
        home.go.set()
        assert (await holding.response()).json["from"] == home.port


@given(st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=30, unique=True), st.integers(0, 3))
@tries(max_examples=40, deadline=None)
@pytest.mark.as_python
def test_a_pool_that_goes_moves_only_its_own_sessions(sessions: list[bytes], gone: int) -> None:
    urls = tuple(UpstreamSettings(f"http://e{n}", "l", "vllm") for n in range(4))
    labelled = tuple(replace(each, label=f"e{n}") for n, each in enumerate(urls))
    settings = Settings(upstreams=labelled, total_blocks=100, block_size=1, context=100)
    pools = standing(upstreams_of(settings, None, lambda _, p, __: (p.blocks, p.sequences)))
    homes = {each: choose(pools, lambda _: Ask((1,), 5), each, 0.0)[0] for each in sessions}
    left = [pool for pool in pools if pool is not pools[gone]]
    for session, home in homes.items():
        now = choose(left, lambda _: Ask((1,), 5), session, 0.0)[0]
        assert now is home or home is pools[gone]


def standing(pools: list[Upstream]) -> list[Upstream]:
    """Without connections: they count as up."""

    class Up:
        is_up = True

    for pool in pools:
        pool.pool = Up()  # type: ignore[assignment]
    return pools


# --- engines that are gone


async def test_a_refused_connection_moves_the_request_and_its_reservation_once() -> None:
    gone, there = Fake(), Fake()
    there.go.set()
    async with before([gone, there]) as gateway:
        first, second = gateway.upstreams
        gone.close()
        for connection in list(first.pool._open):
            connection.abort()
        first.pool.is_up = True
        assert first.pool.take_idle() is None
        answer = await answered(gateway, ask())
        assert (answer.status, answer.json["from"]) == (200, there.port)
        assert (first.gate.admissions, second.gate.admissions) == (1, 1)
        assert not first.is_up
        assert gateway.ready
        # From now on it is left out, until it is back.
        for _ in range(3):
            assert (await answered(gateway, ask())).status == 200
        assert first.gate.admissions == 1
        assert gateway.snapshot()["counters"]["releases"] == {"failed": 1, "completed": 4}


async def test_where_all_engines_are_gone_the_client_is_told_once_and_nothing_is_held() -> None:
    engines = [Fake(), Fake(), Fake()]
    async with before(engines) as gateway:
        for engine, upstream in zip(engines, gateway.upstreams, strict=True):
            engine.close()
            for connection in list(upstream.pool._open):
                connection.abort()
            upstream.pool.is_up = True
        answer = await answered(gateway, ask())
        assert (answer.status, answer.code) == (503, "engine_unavailable")
        assert [upstream.gate.admissions for upstream in gateway.upstreams] == [1, 1, 1]
        assert not gateway.ready


async def test_a_count_that_its_engine_cannot_give_is_asked_of_another() -> None:
    gone, there = Fake(), Fake()
    there.go.set()
    async with before([gone, there]) as gateway:
        first = gateway.upstreams[0]
        gone.close()
        for connection in list(first.pool._open):
            connection.abort()
        first.pool.is_up = True
        answer = await answered(gateway, request(COMPLETIONS, {"model": "m", "prompt": "x", "max_tokens": 5}))
        assert (answer.status, answer.json["from"]) == (200, there.port)
        assert answer.header("x-kvgate-count-source") == "engine"


async def test_what_was_sent_is_not_sent_again_to_another_engine() -> None:
    breaking, there = Fake(), Fake()
    there.go.set()

    async def break_off(*_: Any) -> bytes:
        raise ConnectionError

    async with before([breaking, there]) as gateway:
        breaking._serve = break_off  # type: ignore[method-assign]
        for connection in list(gateway.upstreams[0].pool._open):
            connection.abort()
        answer = await answered(gateway, ask())
        assert (answer.status, answer.code) == (503, "engine_unavailable")
        assert there.generations == []


async def test_an_engine_of_another_kind_is_not_sent_what_this_kind_counted() -> None:
    engines = [Fake(), Fake()]
    for engine in engines:
        engine.go.set()
    async with before(engines, lambda n, _: {"engine": ("llamacpp", "vllm")[n]}) as gateway:
        for _ in range(4):
            assert (await answered(gateway, ask())).json["from"] == engines[0].port
        gateway.upstreams[0].pool.is_up = False
        assert (await answered(gateway, ask())).json["from"] == engines[1].port


# --- ranks


async def test_each_rank_is_a_pool_and_its_requests_are_pinned_whatever_the_client_says() -> None:
    engine = Fake()
    async with before([engine], lambda *_: {"engine": "vllm", "ranks": 3}) as gateway:
        clients = [
            await sent(gateway, ask(tokens=60, headers="X-Data-Parallel-Rank: 0\r\n")) for _ in range(3)
        ]
        await until(lambda: len(engine.generations) == 3)
        lines = [
            [line for line in head.split(b"\r\n") if line.startswith(b"x-data-parallel-rank")]
            for head, _ in engine.generations
        ]
        assert sorted(lines) == [[b"x-data-parallel-rank: %d" % rank] for rank in range(3)]
        assert (await answered(gateway, ask(tokens=60))).code == "kv_capacity"
        shown = gateway.snapshot()["pools"]
        assert [(pool["upstream"], pool["rank"], pool["reserved_blocks"]) for pool in shown] == [
            ("e0/0", 0, 60),
            ("e0/1", 1, 60),
            ("e0/2", 2, 60),
        ]
        assert gateway.snapshot()["engine_connections"] == gateway.upstreams[2].pool.open_connections
        engine.go.set()
        assert [(await client.response()).status for client in clients] == [200] * 3


async def test_a_rank_in_the_body_is_taken_out() -> None:
    engine = Fake()
    engine.go.set()
    async with before([engine], lambda *_: {"engine": "sglang", "ranks": 2}) as gateway:
        body = {"model": "m", "prompt": [1], "max_tokens": 5, "data_parallel_rank": 1, "routed_dp_rank": 1}
        assert (await answered(gateway, request(COMPLETIONS, body))).status == 200
    (head, shown) = engine.generations[0]
    assert b"\r\nx-data-parallel-rank: 0\r\n" in head
    assert shown == body | {"data_parallel_rank": None, "routed_dp_rank": None}


async def test_ranks_that_cannot_be_pinned_are_one_pool_of_the_size_of_one() -> None:
    engine = Fake()
    async with before([engine], lambda *_: {"engine": "lmdeploy", "ranks": 4}) as gateway:
        assert [pool["usable_blocks"] for pool in gateway.snapshot()["pools"]] == [90]


# --- what is asked of the engines

NOTHING_GIVEN = {"engine": None, "total_blocks": None, "block_size": None, "context": None}


async def test_an_engine_tells_what_it_is_and_each_of_its_ranks_becomes_a_pool() -> None:
    both = {"num_gpu_blocks": "128"}
    engine = Fake(pages=vllm(both, both))
    async with before([engine], **NOTHING_GIVEN) as gateway:
        shown = gateway.snapshot()["pools"]
        assert [(p["engine"], p["upstream"], p["total_blocks"], p["context"]) for p in shown] == [
            ("vllm", "e0/0", 63, 4096),
            ("vllm", "e0/1", 63, 4096),
        ]
        assert [pool["up"] for pool in shown] == [True, True]
        clients = [await sent(gateway, ask("tiny", tokens=4000)) for _ in range(2)]
        await until(lambda: len(engine.generations) == 2)
        assert [upstream.gate.ledger.reserved_blocks for upstream in gateway.upstreams] == [32, 32]
        engine.go.set()
        assert [(await client.response()).status for client in clients] == [200, 200]


async def test_the_operators_figures_beat_the_engines_and_a_missing_one_ends_the_start() -> None:
    engine = Fake(pages=vllm())
    async with before([engine], **NOTHING_GIVEN | {"total_blocks": 20}) as gateway:
        facts = gateway.upstreams[0].facts
        assert (facts.total_blocks, facts.block_size, facts.engine) == (20, 128, "vllm")
    hybrid = Fake(pages=vllm({"kv_cache_size_tokens": "12345"}))
    await hybrid.listen()
    settings = Settings(upstreams=at(hybrid.url), listen_port=0, drain_timeout=0.0)
    with pytest.raises(SizesUnknown, match=r"several KV groups.*--model-config FILE"):
        await Gateway(settings).start()
    hybrid.close()
    await settle()


async def test_an_engine_that_comes_later_is_asked_then_and_after_an_outage_again() -> None:
    engine = Fake(pages=vllm())
    await engine.listen()
    engine.close()
    async with before([engine], **NOTHING_GIVEN, engine_idle_timeout=0.4) as gateway:
        upstream = gateway.upstreams[0]
        assert not gateway.ready
        refused = await answered(gateway, ask("tiny"))
        assert (refused.status, refused.code) == (503, "engine_unavailable")
        engine.go.set()
        await engine.listen(engine.port)
        await probe(gateway, gateway.engines)
        assert (gateway.ready, upstream.facts.total_blocks, upstream.engine.name) == (True, 63, "vllm")
        assert (await answered(gateway, ask("tiny"))).status == 200
        # Restarted with a smaller cache.
        engine.pages = vllm({"num_gpu_blocks": "33", "kv_cache_size_tokens": "4224"})
        upstream.was_away = True
        await probe(gateway, gateway.engines)
        assert upstream.facts.total_blocks == 32


async def test_what_an_engine_shows_lowers_what_is_reserved_and_is_told() -> None:
    engine = Fake(pages=vllm())
    async with before([engine], **NOTHING_GIVEN, watch_engine_metrics=True) as gateway:
        upstream = gateway.upstreams[0]
        for counter in ("0.0", "3.0"):
            text = engine.pages["/metrics"].text
            page = re.sub(r"(vllm:num_preemptions_total\{.*\}) .*", rf"\1 {counter}", text)
            engine.pages["/metrics"] = Page(200, page)
            await sizing.look(gateway.upstreams)
        shown = gateway.snapshot()["pools"][0]
        assert shown["drift"]["preemptions"] == 3
        assert shown["safety_fraction"] == upstream.facts.safety_fraction < 0.9
        text = Telemetry(gateway.snapshot).render().decode()
        assert 'kvgate_engine_preemptions_total{engine="vllm",upstream="e0"} 3.0' in text


# --- who asks


async def test_tenants_keys_and_the_headers_of_a_request_reach_the_gate() -> None:
    engine = Fake()
    small = {"name": "small", "keys": ["k1"], "ceiling": 30, "max_output_cap": 25}
    rules = tenant_rules([small, {"name": "b", "keys": ["k2"]}])
    async with before([engine], tenants=rules) as gateway:
        capped = await sent(gateway, ask(tokens=60, headers="Authorization: Bearer k1\r\n"))
        await until(lambda: engine.held == 27)
        refused = await answered(gateway, ask(tokens=20, headers="Authorization: Bearer k1\r\n"))
        assert (refused.status, refused.code) == (429, "tenant_limit")
        other = await sent(gateway, ask(tokens=60, headers="Authorization: Bearer k2\r\n"))
        await until(lambda: engine.held == 87)
        engine.go.set()
        assert [(await client.response()).status for client in (capped, other)] == [200, 200]


async def test_only_listed_keys_come_in_where_there_is_a_list(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    engine = Fake()
    engine.go.set()
    async with before([engine], api_keys=str(keys)) as gateway:
        for headers, status in (("", 401), ("Authorization: Bearer no\r\n", 401)):
            assert (await answered(gateway, ask(headers=headers))).status == status
            listed = request("/v1/models", method="GET", headers=headers)
            assert (await answered(gateway, listed)).code == "invalid_api_key"
        assert (await answered(gateway, ask(headers="Authorization: Bearer secret\r\n"))).status == 200
        keys.write_text("other\n")
        gateway.reload(gateway.settings)
        assert (await answered(gateway, ask(headers="Authorization: Bearer secret\r\n"))).status == 401


# --- what is shown, and what can be changed


async def test_explain_says_which_pool_and_why() -> None:
    engines = [Fake(), Fake()]
    async with before(engines) as gateway:
        holding = await sent(gateway, ask(tokens=60))
        await until(lambda: engines[0].held == 60)
        body = json.dumps({"model": "m", "prompt": [1, 2], "max_tokens": 40}).encode()
        shown = await gateway.explain(COMPLETIONS, body)
        assert (shown["decision"], shown["upstream"]) == ("admit", "e1")
        assert [(p["upstream"], p["chosen"], p["free_tokens"]) for p in shown["pools"]] == [
            ("e0", False, 30),
            ("e1", True, 90),
        ]
        engines[0].go.set()
        assert (await holding.response()).status == 200


async def test_a_reload_changes_the_limits_of_one_engine_and_drops_no_stream() -> None:
    engines = [Fake(), Fake()]
    async with before(engines) as gateway:
        holding = await sent(gateway, ask(tokens=60))
        await until(lambda: engines[0].held == 60)
        old = gateway.settings
        smaller = replace(old.upstreams[0], total_blocks=20), replace(old.upstreams[1], safety_fraction=0.5)
        told = gateway.reload(replace(old, upstreams=smaller))
        assert set(told.changed) == {"upstreams"}
        assert [u.facts.usable_blocks for u in gateway.upstreams] == [18, 50]
        other = replace(old, upstreams=(UpstreamSettings("http://elsewhere:1"),))
        assert set(gateway.reload(other).kept) == {"upstreams"}
        engines[0].go.set()
        assert (await holding.response()).status == 200


# --- the law, with several pools


@pytest.mark.parametrize("seed", [next(SEEDS) for _ in range(3)])
async def test_no_pool_ever_holds_more_than_is_usable_under_cancels_and_outages(seed: int) -> None:
    """The engines themselves count what they hold."""
    chance = random.Random(seed)
    engines = [Fake(("m", f"only-{n}")) for n in range(3)]
    async with before(engines, max_wait=0.3, abort_grace=0.1) as gateway:

        async def one() -> None:
            model = chance.choice(["m", "m", "only-0", "only-2"])
            client = await sent(gateway, ask(model, tokens=chance.randint(5, 70)))
            try:
                async with asyncio.timeout(chance.uniform(0.0, 0.4)):
                    await client.response()
            except (TimeoutError, ConnectionError):
                pass
            finally:
                client.cut()

        async def turmoil() -> None:
            while True:
                await asyncio.sleep(chance.uniform(0.005, 0.03))
                engine = chance.choice(engines)
                engine.go.set()
                await asyncio.sleep(0)
                engine.go.clear()
                if chance.random() < 0.2:
                    chance.choice(gateway.upstreams).pool.is_up = False
                gateway.upstreams[chance.randrange(3)].pool.is_up = True

        upset = asyncio.create_task(turmoil())
        for _ in range(12):
            await asyncio.gather(*(one() for _ in range(12)))
            for upstream in gateway.upstreams:
                upstream.gate.ledger.recount()
                assert upstream.gate.ledger.reserved_blocks <= upstream.facts.usable_blocks
        upset.cancel()
        await until(lambda: all(len(u.gate.ledger) == 0 and not u.gate.line for u in gateway.upstreams))
    assert max(engine.most for engine in engines) <= 90, f"seed {seed}"
    assert sum(len(engine.generations) for engine in engines) > 50, f"seed {seed}"
    assert gateway.snapshot()["counters"]["moves"] > 0, f"seed {seed}"


def test_groups_are_made_of_pools_that_share_a_name() -> None:
    names = [("a", "b"), ("c",), ("b", "d"), ("e",), ("e", "c")]
    settings = Settings(
        upstreams=tuple(UpstreamSettings(f"http://e{n}", models=each) for n, each in enumerate(names)),
        engine="vllm",
        total_blocks=100,
        block_size=1,
        context=100,
    )
    pools = upstreams_of(settings, None, lambda _, p, __: (p.blocks, p.sequences))
    fleet = Fleet(pools)
    assert [[pools.index(each) for each in group] for group in fleet.groups] == [[0, 2], [1, 3, 4]]
    assert [pools.index(each) for each in fleet.serving("b")] == [0, 2]
    assert [pools.index(each) for each in fleet.serving("d")] == [2]


def test_facts_come_from_the_upstream_before_they_come_from_all() -> None:
    own = UpstreamSettings("http://a", total_blocks=10, safety_fraction=1.0)
    settings = Settings(upstreams=(own, UpstreamSettings("http://b")), engine="vllm", total_blocks=99)
    settings = replace(settings, block_size=2, context=20)
    first, second = upstreams_of(settings, None, lambda _, p, __: (p.blocks, p.sequences))
    assert first.facts == PoolFacts(10, 2, 20, safety_fraction=1.0, engine="vllm")
    assert second.facts == PoolFacts(99, 2, 20, engine="vllm")
