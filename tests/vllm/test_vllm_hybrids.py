"""Real vLLM servers whose layers are of several kinds, behind kvgate: `make test-vllm`.

What the engine says of its cache while it works is never more than kvgate's books, for one request
alone to the block and for a storm at every sample; and a storm that preempts without kvgate does not
with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from vllmsoak.books import compared
from vllmsoak.load import BODY, Load, measured, text
from vllmsoak.servers import Engine, Model, gate, metric, vllm

from kvgate.cli.doctor import examine
from kvgate.core.geometry import Serving
from kvgate.edge.upstreams.discovery import Given

pytestmark = pytest.mark.vllm

SEED = 20261204
GATED_SECONDS = 20.0
DIRECT_SECONDS = 10.0
# One sliding-window model and one with states (gated delta net), each with a full layer in three.
MODELS = [Model("sliding", blocks=96, batched_tokens=512), Model("linear", blocks=64, batched_tokens=512)]


@dataclass
class Running:
    engine: Engine
    url: str
    admin: str


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model.kind)
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    with (
        vllm(os.environ["KVGATE_VLLM_PYTHON"], request.param) as engine,
        gate(engine, ["--safety-fraction", "auto"]) as gateway,
    ):
        yield Running(engine, gateway.url, gateway.admin)


def test_it_asks_for_the_model_configuration_and_prices_exactly_with_it(running: Running) -> None:
    engine = running.engine
    assert engine.config is not None
    config = json.loads(engine.config.read_text())
    serving = Serving(max_batched_tokens=engine.model.batched_tokens)

    without = asyncio.run(examine(engine.url)).found
    found = asyncio.run(examine(engine.url, given=Given(model_config=config, serving=serving))).found

    assert without.missing == ("model_config",)
    assert found.is_exact
    assert found.facts is not None
    assert found.facts.total_blocks == engine.model.blocks - 1


def test_one_request_never_holds_more_than_its_price(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    dice = random.Random(SEED)
    shapes = [
        (40, 900),
        (300, 700),
        (1000, 300),
        (1900, 200),
        (dice.randint(1, 2000), dice.randint(300, 600)),
    ]
    for prompt, cap in shapes:
        price, most = alone(running, text(dice, prompt), cap)
        with capsys.disabled():
            print(
                f"\n{running.engine.model.kind}: {prompt} in, {cap} out: {most} held, {price} priced", end=""
            )
        # Far less in use than priced would mean that the page was not looked at in time.
        assert price / 3 <= most <= price, (prompt, cap, SEED)


def test_a_storm_stays_within_the_books_and_preempts_only_without_kvgate(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = running.engine
    with compared(engine.url, running.admin) as books:
        gated = measured(
            "gated", engine.url, Load(running.url, engine.url, 24, SEED, "adversarial"), GATED_SECONDS
        )
    direct = measured(
        "direct", engine.url, Load(engine.url, engine.url, 24, SEED, "adversarial"), DIRECT_SECONDS
    )

    with capsys.disabled():
        print(f"\n{engine.model.kind}: {json.dumps([asdict(gated), asdict(direct)], indent=1)}")
        print(f"{len(books.samples)} samples, at most {books.most_used:.2f} of the pool in use")
    assert (direct.preemptions > 0, direct.refused, gated.refused) == (True, 0, 0)
    assert (gated.preemptions, gated.failed, books.over, books.errors) == (0, 0, [], [])
    assert gated.finished > 0
    # Enough looks, at a pool that was full: else nothing has been shown.
    assert len(books.samples) > GATED_SECONDS * 2
    assert books.fill > 0.6


def alone(running: Running, prompt: str, cap: int) -> tuple[int, int]:
    """The price of a request that has the engine to itself, and the most blocks that it was seen to hold."""
    total = running.engine.model.blocks - 1
    until_idle(running.engine.url)
    seen, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            seen.append(round(metric(running.engine.url, "vllm:kv_cache_usage_perc") * total))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        body = BODY | {"prompt": prompt, "max_tokens": cap, "stream": False}
        answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=120)
    finally:
        stop.set()
        watcher.join()
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == cap
    return int(answer.headers["x-kvgate-reserved-blocks"]), max(seen)


def until_idle(url: str) -> None:
    deadline = time.monotonic() + 30
    while metric(url, "vllm:kv_cache_usage_perc") or metric(url, "vllm:num_requests_running"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
