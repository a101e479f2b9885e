"""Which engine answers, asked in an order that changes nothing there, in bounded time and size."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from engine_pages import llamacpp, model_list, ollama, pages, sglang, tgi, vllm, vllm_metrics
from kvgate.core.gate import Gate
from kvgate.core.records import Ask, Granted, PoolFacts
from kvgate.edge.gatekeeper import Gatekeeper
from kvgate.edge.relay.pool import EngineUnavailable
from kvgate.edge.upstreams import discovery
from kvgate.edge.upstreams.access import OPEN
from kvgate.edge.upstreams.discovery import Given, discover
from kvgate.edge.upstreams.drift import Drift
from kvgate.edge.upstreams.upstream import PINNED_BY_HEADER, RANK_HEADER
from kvgate.wire.engines.found import Page
from kvgate.wire.engines.known import ENGINES
from kvgate.wire.engines.sights import Sight


class Site:
    """Pages at an address; everything else is 404. `asked` is what was asked for, in order."""

    def __init__(self, served: Mapping[str, Page]) -> None:
        self.served = served
        self.asked: list[str] = []

    async def fetch(self, method: str, path: str, body: bytes | None = None) -> tuple[int, str]:
        assert (method, body) == ("GET", None)
        self.asked.append(path)
        page = self.served.get(path, Page(404, '{"error":"no such page"}'))
        if page.status == 0:
            raise EngineUnavailable(page.text)
        return page.status, page.text


@pytest.mark.parametrize(
    ("name", "served", "blocks"),
    [
        ("vllm", vllm(), 63),
        ("sglang", sglang(), 1024),
        ("llamacpp", llamacpp(), 2048),
        ("tgi", tgi(), 255),
        ("ollama", ollama(4096), 1),
    ],
)
async def test_an_engine_is_found_and_read(name: str, served: Mapping[str, Page], blocks: int) -> None:
    site = Site(served)
    found = await discover(site.fetch)

    assert (found.engine, found.is_up) == (name, True)
    assert found.facts is not None
    assert found.facts.total_blocks == blocks
    assert len(site.asked) == len(set(site.asked)) <= 9


async def test_a_signed_engine_is_not_asked_for_the_pages_of_others() -> None:
    site = Site(vllm())
    await discover(site.fetch)

    assert site.asked == ["/v1/models", "/version", "/metrics"]


async def test_tensorrt_llms_statistics_are_left_to_whoever_reads_them() -> None:
    served = pages({"/v1/models": model_list("tensorrt_llm", "m"), "/version": {"version": "1.4.0"}})
    site = Site(served | {"/metrics": Page(200, "[]")})
    found = await discover(site.fetch, overrides=Given(total_blocks=500, block_size=32, context=4096))

    assert "/metrics" not in site.asked
    assert (found.engine, found.models, found.version) == ("tensorrt-llm", ("m",), "1.4.0")
    assert found.facts == PoolFacts(500, 32, 4096, engine="tensorrt-llm")
    for name in (None, "tensorrt-llm", "generic"):
        site = Site(pages({"/v1/models": model_list("somebody", "m")}))
        await discover(site.fetch, name)
        assert "/metrics" not in site.asked


async def test_an_engine_that_nobody_knows_is_asked_about_not_guessed() -> None:
    found = await discover(Site(pages({"/v1/models": model_list("somebody", "m")})).fetch)

    assert (found.engine, found.facts, found.models) == ("generic", None, ("m",))
    assert "--engine NAME" in found.unknown[0]


async def test_pages_that_fit_two_engines_are_asked_about() -> None:
    both = llamacpp() | tgi() | pages({"/v1/models": model_list("somebody", "m")})
    found = await discover(Site(both).fetch)

    assert found.engine == "generic"
    assert "llamacpp and tgi" in found.unknown[0]


async def test_an_engine_that_is_down_is_told_with_the_reason() -> None:
    site = Site({"/v1/models": Page(0, "connection refused")})
    found = await discover(site.fetch)

    assert (found.is_up, found.facts) == (False, None)
    assert "connection refused" in found.unknown[0]
    assert site.asked == ["/v1/models"]


async def test_an_engine_that_never_answers_does_not_hold_up_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discovery, "PAGE_SECONDS", 0.01)

    async def fetch(method: str, path: str, body: bytes | None = None) -> tuple[int, str]:
        await asyncio.Event().wait()
        raise AssertionError

    found = await discover(fetch, "vllm")

    assert not found.is_up
    assert "no answer within" in found.unknown[0]


async def test_a_page_without_end_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "PAGE_BYTES_MAX", 300)
    found = await discover(Site(vllm()).fetch, "vllm")

    assert found.facts is None
    assert found.context == 4096


async def test_a_key_that_is_missing_is_named_and_the_rest_is_read() -> None:
    served = vllm() | {"/v1/models": Page(401, '{"error":"Unauthorized"}')}
    found = await discover(Site(served).fetch, "vllm", Given(context=4096, model_config=None))

    assert "key_needed" in {f.code for f in found.warnings}
    assert found.is_doubtful


async def test_the_older_page_is_asked_for_only_where_the_newer_is_missing() -> None:
    new, old = (
        Site(sglang()),
        Site({"/get_server_info": sglang()["/server_info"]} | {"/v1/models": sglang()["/v1/models"]}),
    )
    await discover(new.fetch)
    found = await discover(old.fetch)

    assert "/get_server_info" not in new.asked
    assert "/get_server_info" in old.asked
    assert found.facts is not None


class Metrics:
    """A pool's page that a test writes, and the gate that is corrected by it."""

    def __init__(self, facts: PoolFacts) -> None:
        self.gate = Gate(facts)
        self.keeper = Gatekeeper(self.gate, asyncio.get_running_loop())
        self.text: str | None = None
        self.drift: Drift | None = None
        self.pool: Any = SimpleNamespace(prefix=b"", authority=b"e", access=OPEN, fetch=self.answer)

    def resize(self, facts: PoolFacts) -> None:
        self.keeper.resize(facts)

    async def answer(self, request: bytes) -> Any:
        if self.text is None:
            raise EngineUnavailable("connection refused")
        return SimpleNamespace(status=200, body=self.text.encode())

    def shows(self, usage: float, preemptions: int) -> None:
        name = '{engine="0",model_name="tiny"} '
        text = vllm_metrics().replace(f"kv_cache_usage_perc{name}0.25", f"kv_cache_usage_perc{name}{usage}")
        self.text = text.replace(
            f"num_preemptions_total{name}0.0", f"num_preemptions_total{name}{preemptions}"
        )


FACTS = PoolFacts(1000, 16, 1600, engine="vllm")


async def test_a_preemption_at_the_engine_takes_room_from_newcomers_and_nothing_from_those_inside() -> None:
    watched, drift = Metrics(FACTS), Drift("vllm", FACTS)
    watched.drift = drift
    assert isinstance(watched.gate.ask(Ask((1,), 1600), 0.0), Granted)
    watched.shows(0.05, 0)
    await drift.look(watched)
    watched.shows(0.05, 3)
    await drift.look(watched)

    assert watched.gate.facts.usable_blocks == 850
    assert watched.gate.ledger.reserved_blocks == 100
    assert drift.snapshot()["preemptions"] == 3


async def test_a_foreign_client_is_seen_as_use_above_the_ledger() -> None:
    watched, drift = Metrics(FACTS), Drift("vllm", FACTS)
    watched.drift = drift
    watched.shows(0.3, 0)
    for _ in range(2):
        await drift.look(watched)

    assert drift.snapshot()["excess_blocks"] == 300
    assert watched.gate.facts.safety_fraction == pytest.approx(0.9 - 0.3)


async def test_looking_only_changes_nothing() -> None:
    watched, drift = Metrics(FACTS), Drift("vllm", FACTS, is_on=False)
    watched.drift = drift
    watched.shows(0.3, 9)
    for _ in range(3):
        await drift.look(watched)

    assert watched.gate.facts is FACTS
    assert drift.snapshot()["overuses"] == 2


async def test_an_engine_that_cannot_be_looked_at_is_treated_as_before() -> None:
    watched, drift = Metrics(FACTS), Drift("vllm", FACTS)
    watched.drift = drift
    for text in (None, "", "nonsense", "vllm:kv_cache_usage_perc NaN"):
        watched.text = text
        await drift.look(watched)

    assert watched.gate.facts is FACTS
    assert drift.snapshot()["blind_looks"] == 4
    assert drift.snapshot()["seconds_since_look"] is None


async def test_one_request_of_a_whole_context_always_stays_possible() -> None:
    facts = replace(FACTS, context=8000)
    watched, drift = Metrics(facts), Drift("vllm", facts)
    watched.drift = drift
    for count in range(30):
        watched.shows(0.0, count)
        await drift.look(watched)

    assert watched.gate.facts.usable_blocks == 500
    assert isinstance(watched.gate.ask(Ask((1,), None), 0.0), Granted)


async def test_an_engine_without_figures_is_not_asked() -> None:
    watched, drift = Metrics(FACTS), Drift("tensorrt-llm", FACTS)
    watched.drift = drift
    await drift.look(watched)

    assert (drift.looks, drift.can_look, drift.sight) == (0, False, Sight())


def test_auto_may_rise_only_where_capacity_and_price_are_exact() -> None:
    assert Drift("vllm", FACTS, is_exact=True).correction.ceiling == 1.0
    assert Drift("vllm", FACTS).correction.ceiling == 0.90
    assert Drift("vllm", FACTS, safety_fraction=0.8, is_exact=True).correction.ceiling == 0.8
    assert json.dumps(Drift("vllm", FACTS).snapshot())


def test_the_ranks_that_are_pinned_are_those_whose_engine_has_a_header_for_it() -> None:
    assert {engine.name for engine in ENGINES.values() if engine.rank_header} == PINNED_BY_HEADER
    assert {engine.rank_header for engine in ENGINES.values()} == {None, RANK_HEADER}
