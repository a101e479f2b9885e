"""What is decided before a prompt is counted: some requests are refused, some let in on a bound."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import CHAT, COMPLETIONS, Client, Engine, Response, request
from small_model import write_model

from kvgate.config import Settings, at
from kvgate.core.records import PoolFacts
from kvgate.core.tenancy import TenantRule
from kvgate.edge.counting.counted import Counted
from kvgate.edge.counting.off_loop import Job, ThreadCounter
from kvgate.edge.counting.trust import AGREEMENTS
from kvgate.edge.counting.uncounted import VALUES_MAX, most_of
from kvgate.edge.gatekeeper import Gatekeeper
from kvgate.edge.gateway import Gateway
from kvgate.edge.observing.telemetry import Telemetry
from kvgate.edge.relay.finished import Finished
from kvgate.edge.relay.uncounted import Uncounted
from kvgate.tokens import CannotCount, PromptCounter, load
from kvgate.wire.dialects.shape import Conversation

CONTEXT = 8_000
FACTS = PoolFacts(total_blocks=20_000, block_size=1, context=CONTEXT, safety_fraction=1.0)
SLOW = {"chunks": 400, "interval_ms": 10}
LONG = "the lazy dog " * 100  # 1,300 bytes
CAP = 50


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> PromptCounter:
    return load(model)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    started = Engine()
    yield started
    started.kill()


class Counts:
    """Stands where long prompts are counted; counts when it is told to."""

    def __init__(self, patch: pytest.MonkeyPatch, long: int) -> None:
        self.jobs: list[Job] = []
        patch.setattr(PromptCounter, "is_long", lambda _, characters: characters > long)
        patch.setattr(ThreadCounter, "count", self._count)

    def _count(self, shape: Any, seconds: float, then: Callable[[Counted | CannotCount], None]) -> Job:
        self.jobs.append(Job([], then))
        return self.jobs[-1]

    async def job(self, number: int = 0) -> Job:
        await until(lambda: len(self.jobs) > number)
        return self.jobs[number]

    async def say(self, *tokens: int) -> None:
        (await self.job(len(self.jobs) - 1 if self.jobs else 0)).finish(Counted(tokens, "tokenizer"))


class Running:
    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.finished: list[Finished] = []
        gateway.observers.append(self.finished.append)
        self.clients: list[Client] = []

    @property
    def reserved(self) -> int:
        return self.gateway.gate.ledger.reserved_blocks

    @property
    def counting(self) -> dict[str, Any]:
        return self.gateway.counter.snapshot()

    async def client(self, data: bytes) -> Client:
        client = await Client.connect(self.gateway.port)
        self.clients.append(client)
        client.send(data)
        return client

    async def fetch(self, data: bytes) -> Response:
        return await (await self.client(data)).response()

    async def streaming(self, data: bytes) -> Client:
        client = await self.client(data)
        await client.events(1)
        assert client.current.status == 200
        return client

    async def completed(self) -> Finished:
        await until(lambda: bool(self.finished))
        return self.finished[-1]


async def until(is_so: Callable[[], bool], within: float = 5.0) -> None:
    async with asyncio.timeout(within):
        while not is_so():  # noqa: ASYNC110 - the gateway's own state
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def running(
    upstream: Engine, model: Path, facts: PoolFacts = FACTS, *, trusted: bool = True, **settings: Any
) -> AsyncIterator[Running]:
    wanted: dict[str, Any] = {
        "upstreams": at(f"http://127.0.0.1:{upstream.port}"),
        "engine": "vllm",
        "tokenizer": str(model),
        "listen_port": 0,
        "abort_grace": 0.05,
        "max_wait": 0.0,
        "drain_timeout": 0.2,
        "watch_engine_metrics": False,
    }
    gateway = Gateway(Settings(**(wanted | settings)), facts)
    await gateway.start()
    for tokens in range(AGREEMENTS if trusted else 0):
        for is_chat in (True, False):
            gateway.counter.trust.compare(
                is_chat, Counted((tokens,), "tokenizer"), Counted((tokens,), "engine")
            )
    run = Running(gateway)
    try:
        yield run
    finally:
        for client in run.clients:
            client.cut()
        await until(lambda: not len(gateway.gate.ledger) and not gateway.gate.line)
        await gateway.stop()
    gateway.gate.ledger.recount()
    assert run.reserved == 0
    assert gateway.gate.ledger.double_releases == 0
    assert gateway.gate.admissions == sum(gateway.gate.releases.values())


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    return Counts(monkeypatch, long=1_000)


def without(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not ...}


def completion(text: str = LONG, script: dict[str, Any] | None = None, **fields: Any) -> bytes:
    body = without({"prompt": text, "max_tokens": CAP, "stream": True} | fields)
    return request(COMPLETIONS, body, SLOW if script is None else script)


def chat(text: str = LONG, script: dict[str, Any] | None = None, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": text}]
    body = without({"messages": messages, "max_tokens": CAP, "stream": True} | fields)
    return request(CHAT, body, SLOW if script is None else script)


def bound_of(tokenizer: PromptCounter, text: str) -> int:
    most = tokenizer.proofs.most(text)
    assert most is not None
    return most


# --- let in on a bound


async def test_an_answer_begins_before_the_prompt_is_counted_and_is_corrected_by_the_count(
    engine: Engine, model: Path, tokenizer: PromptCounter, counts: Counts
) -> None:
    most, exact = bound_of(tokenizer, LONG), tokenizer.count_text(LONG).prompt_tokens
    script = {"chunks": 40, "interval_ms": 10, "prompt_tokens": exact}
    async with running(engine, model) as run:
        client = await run.streaming(completion(script=script))

        assert not counts.jobs[0].is_over
        assert dict(client.current.headers)["x-kvgate-count-source"] == "bound"
        assert dict(client.current.headers)["x-kvgate-reserved-blocks"] == str(most + CAP - 1)
        assert run.reserved == most + CAP - 1
        assert run.counting["sources"] == {"bound": 1}
        assert (run.counting["on_bound"], run.counting["settled"]) == (1, 0)

        await counts.say(exact)

        assert run.reserved == exact + CAP - 1 < most
        assert run.gateway.gate.line.shares.held() == {"": exact + CAP - 1}
        assert (await client.response()).complete
        told = await run.completed()
        assert (told.counted_prompt, told.engine_prompt) == (exact, exact)
        assert (told.priced_tokens, told.reserved_tokens) == (exact + CAP, exact + CAP - 1)
        assert run.counting["sources"] == {"bound": 1}
        shown = Telemetry(run.gateway.snapshot).render().decode()
        for name in ("bound_admissions", "bound_settlements"):
            assert f'kvgate_{name}_total{{upstream="127.0.0.1:{engine.port}"}} 1.0' in shown


async def test_the_engine_is_sent_the_cap_that_the_count_would_have_given(
    engine: Engine, model: Path, counts: Counts
) -> None:
    """A default cap is as good as the client's own: it does not depend on the count either."""
    async with running(engine, model, default_output_cap=70) as run:
        engine.stats(reset=True)
        client = await run.streaming(chat(max_tokens=...))
        told = dict(client.current.headers)
        (seen,) = engine.generations_seen()

    assert (told["x-kvgate-output-cap"], told["x-kvgate-count-source"]) == ("70", "bound")
    assert json.loads(seen["body"])["max_tokens"] == 70


async def test_what_the_count_sets_free_goes_to_those_who_wait(
    engine: Engine, model: Path, tokenizer: PromptCounter, counts: Counts
) -> None:
    async with running(engine, model, max_wait=10.0) as run:
        await run.streaming(completion())
        rest = FACTS.usable_blocks - run.reserved
        body = {"prompt": [1] * 100, "max_tokens": (rest + 4) // 4 - 98, "n": 4}
        waiter = await run.client(request(COMPLETIONS, body))
        await until(lambda: bool(run.gateway.gate.line))

        await counts.say(300)

        assert (await waiter.response()).status == 200


async def test_a_client_that_leaves_before_the_count_ends_both(
    engine: Engine, model: Path, counts: Counts
) -> None:
    async with running(engine, model) as run:
        client = await run.streaming(completion())
        job = await counts.job()
        client.cut()
        await until(lambda: run.reserved == 0)

        assert job.is_over
        job.finish(Counted((300,), "tokenizer"))
        assert (run.reserved, run.counting["settled"]) == (0, 0)
        assert (await run.completed()).outcome == "cancelled"


async def test_a_count_that_comes_while_the_engine_lets_go_changes_nothing(
    engine: Engine, model: Path, counts: Counts
) -> None:
    async with running(engine, model, abort_grace=0.3) as run:
        client = await run.streaming(completion())
        held = run.reserved
        job = await counts.job()
        job.is_over, then = True, job._then  # as one that cannot be stopped any more
        client.cut()
        await until(lambda: run.gateway.keeper.lingering == 1)
        then(Counted((300,), "tokenizer"))

        assert run.reserved == held
        await until(lambda: run.reserved == 0)


async def test_an_answer_that_ends_before_the_count_is_released_once(
    engine: Engine, model: Path, counts: Counts
) -> None:
    async with running(engine, model) as run:
        answer = await run.fetch(completion(script={"chunks": 2, "prompt_tokens": 300}))
        told = await run.completed()
        job = await counts.job()

        assert answer.complete
        assert job.is_over
        assert (told.outcome, told.counted_prompt, told.engine_prompt) == ("completed", None, 300)
        assert run.reserved == 0
        assert run.counting["settled"] == 0
        assert run.gateway.counter.trust.why == ""


async def test_a_gateway_that_stops_does_not_wait_for_the_count(
    engine: Engine, model: Path, counts: Counts
) -> None:
    async with running(engine, model) as run:
        client = await run.streaming(completion())
        await run.gateway.stop()

        assert b'"draining"' in (await client.response()).body
        assert (await counts.job()).is_over


async def test_a_count_that_fails_leaves_the_bound_and_asks_the_engine_nothing(
    engine: Engine, model: Path, counts: Counts
) -> None:
    async with running(engine, model) as run:
        client = await run.streaming(completion())
        held, calls = run.reserved, run.counting["engine_calls"]
        (await counts.job()).finish(CannotCount("it died"))
        await client.events(5)

        assert (run.reserved, run.counting["engine_calls"]) == (held, calls)
        assert (run.counting["on_bound"], run.counting["settled"]) == (1, 0)


async def test_a_count_above_the_bound_keeps_the_bound_and_ends_the_belief(
    engine: Engine, model: Path, tokenizer: PromptCounter, counts: Counts
) -> None:
    async with running(engine, model) as run:
        await run.streaming(completion())
        held = run.reserved
        await counts.say(bound_of(tokenizer, LONG) + 1)

        assert run.reserved == held
        assert "for the most" in run.counting["distrusted"]
        assert not run.gateway.counter.trust.holds(is_chat=True)


async def test_a_usage_above_the_bound_ends_the_belief(
    engine: Engine, model: Path, tokenizer: PromptCounter, counts: Counts
) -> None:
    async with running(engine, model) as run:
        above = bound_of(tokenizer, LONG) + 1
        await run.fetch(completion(script={"chunks": 2, "prompt_tokens": above}))
        await run.completed()

        assert "for the most" in run.counting["distrusted"]


@pytest.mark.parametrize(
    "data",
    [
        chat(max_tokens=...),  # its cap is the rest of the context: a bound leaves less of it
        completion(max_tokens=CONTEXT - 1_300),  # bound and cap are more than the context
        completion(n=8),  # more than half of what is free
        completion(n=16),  # more than there is
        chat(messages=[{"role": "user", "content": "x"}] * 1_100),  # too many pieces to write out
    ],
)
async def test_what_is_not_easy_waits_for_its_count(
    engine: Engine, model: Path, counts: Counts, data: bytes
) -> None:
    async with running(engine, model) as run:
        client = await run.client(data)
        await counts.job()
        await asyncio.sleep(0.02)

        assert run.reserved == 0
        await counts.say(300)
        await client.events(1)
        assert dict(client.current.headers)["x-kvgate-count-source"] == "tokenizer"
        assert run.counting["on_bound"] == 0


async def test_a_chat_is_bounded_by_what_its_template_writes(
    engine: Engine, model: Path, tokenizer: PromptCounter, counts: Counts
) -> None:
    written = tokenizer.proofs.written({"messages": [{"role": "user", "content": LONG}]})
    async with running(engine, model) as run:
        await run.streaming(chat())

        assert "<|im_start|>user" in written
        assert run.reserved == bound_of(tokenizer, written) + CAP - 1


async def test_a_text_that_only_the_engine_can_count_goes_on_meanwhile(
    engine: Engine, model: Path, tokenizer: PromptCounter
) -> None:
    """llama.cpp counts special tokens itself; here it never answers."""
    text = "hello <|im_start|> world"
    async with running(engine, model, engine="llamacpp") as run:
        client = await run.streaming(completion(text, SLOW | {"count_fault": "hang"}))

        assert dict(client.current.headers)["x-kvgate-count-source"] == "bound"
        assert run.reserved == bound_of(tokenizer, text) + CAP - 1
        assert run.counting["engine_calls"] == 1


async def test_the_engines_own_count_corrects_it_too(engine: Engine, model: Path) -> None:
    text = "hello <|im_start|> world"
    async with running(engine, model, engine="llamacpp") as run:
        await run.streaming(completion(text, SLOW | {"prompt_tokens": 5}))
        await until(lambda: run.reserved == 5 + CAP - 1)

        assert run.counting["settled"] == 1


async def test_nothing_is_bounded_by_a_tokenizer_that_has_not_agreed_yet(engine: Engine, model: Path) -> None:
    async with running(engine, model, trusted=False) as run:
        client = await run.streaming(completion())

        assert dict(client.current.headers)["x-kvgate-count-source"] == "engine"
        assert run.counting["on_bound"] == 0


async def test_a_real_count_beside_the_loop_corrects_what_was_let_in(
    engine: Engine, model: Path, tokenizer: PromptCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PromptCounter, "is_long", lambda _, characters: characters > 1_000)
    exact = tokenizer.count_text(LONG).prompt_tokens
    async with running(engine, model) as run:
        client = await run.streaming(completion())
        await until(lambda: run.reserved == exact + CAP - 1)

        assert dict(client.current.headers)["x-kvgate-count-source"] == "bound"


async def test_many_that_come_and_go_at_any_moment_leave_nothing_behind(
    engine: Engine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts, answers, clients that leave and a narrow pool, in the order that the machine gives them."""
    monkeypatch.setattr(PromptCounter, "is_long", lambda _, characters: characters > 1_000)
    facts = PoolFacts(total_blocks=9_000, block_size=1, context=CONTEXT, safety_fraction=1.0)
    async with running(engine, model, facts, max_wait=2.0) as run:

        async def one(number: int) -> None:
            await asyncio.sleep(number * 0.002)
            script = {"chunks": number % 7, "interval_ms": number % 3}
            client = await run.client((chat if number % 2 else completion)(script=script))
            if number % 5 == 0:
                await asyncio.sleep(0.001 * (number % 11))
                client.cut()
            else:
                assert (await client.response()).status in (200, 429)
            assert run.reserved <= facts.usable_blocks

        await asyncio.gather(*(one(number) for number in range(120)))
        assert 0 < run.counting["settled"] <= run.counting["on_bound"]
        assert run.gateway.counter.trust.why == ""


@pytest.mark.as_python
async def test_a_defect_of_ours_after_the_answer_has_begun_leaves_the_engine(
    engine: Engine, model: Path, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Gatekeeper, key: int, blocks: int) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(Gatekeeper, "settle", broken)
    async with running(engine, model, abort_grace=0.3) as run:
        client = await run.streaming(completion())
        held = run.reserved
        with pytest.raises(RuntimeError, match="a defect"):
            await counts.say(300)
        await client.closed.wait()

        # Not before the engine has let go: it was left, and has its grace.
        assert (run.reserved, run.gateway.keeper.lingering) == (held, 1)
        await until(lambda: run.gateway.pool.open_connections == 0)


# --- refused by its bytes


HUGE = "the lazy dog jumps over it " * 750_000  # 20 MB


@pytest.mark.as_python
async def test_a_prompt_of_20_mb_is_refused_without_being_counted(
    engine: Engine, model: Path, tokenizer: PromptCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[float] = []
    look = Uncounted._is_hopeless

    def timed(self: Uncounted, shape: Any) -> bool:
        began = time.process_time()
        try:
            return look(self, shape)
        finally:
            taken.append(time.process_time() - began)

    monkeypatch.setattr(Uncounted, "_is_hopeless", timed)
    async with running(engine, model) as run:
        answers = [await run.fetch(data) for data in (completion(HUGE), chat(HUGE, max_tokens=...))]

        assert run.gateway.counter._beside is None
        assert run.counting["beside"] == 0
        assert run.counting["refused_uncounted"] == 2
        assert run.gateway.gate.refusals["context_length_exceeded"] == 2
        shown = Telemetry(run.gateway.snapshot).render().decode()
        assert f'kvgate_uncounted_refusals_total{{upstream="127.0.0.1:{engine.port}"}} 2.0' in shown
    for answer in answers:
        assert (answer.status, answer.code) == (413, "context_length_exceeded")
        assert answer.header("x-should-retry") == "false"
        told = answer.json["error"]["message"]
        found = re.match(r"The prompt has at least (\d+) tokens and the context is 8000:", told)
        assert found is not None, told
        assert CONTEXT <= int(found[1]) <= 27 * 750_000
    assert max(taken) < 0.02, taken


async def test_a_pool_that_is_too_small_refuses_by_bytes_too(
    engine: Engine, model: Path, counts: Counts
) -> None:
    facts = PoolFacts(total_blocks=2_000, block_size=1, context=1_000_000, safety_fraction=1.0)
    async with running(engine, model, facts) as run:
        answer = await run.fetch(completion("the lazy dog " * 4_000))

        assert (answer.status, answer.code) == (413, "kv_capacity_exceeded")
        error = answer.json["error"]
        assert "a prompt of at least " in error["message"]
        assert "Shorten the prompt" in error["message"]
        assert error["output_cap_that_fits"] is None
        assert counts.jobs == []


async def test_a_tenants_limit_refuses_by_bytes_too(engine: Engine, model: Path, counts: Counts) -> None:
    tenants = (TenantRule("small", ceiling_fraction=0.05),)
    async with running(engine, model, tenants=tenants, trust_tenant_header="x-tenant") as run:
        body = json.dumps({"prompt": "the lazy dog " * 4_000, "max_tokens": 1}).encode()
        small = await run.fetch(request(COMPLETIONS, body, headers="x-tenant: small\r\n"))

        assert (small.status, small.code) == (413, "kv_capacity_exceeded")
        assert counts.jobs == []
        assert (await run.completed()).tenant == "small"


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": " " * 200_000},  # some tokens take any number of blanks
        {"prompt": "漢字" * 50_000},
        {"truncate_prompt_tokens": 100},  # the engine takes only a part of it
        {"prompt": "the lazy dog " * 4_000, "max_tokens": 7_990},  # a shorter answer would fit
    ],
)
async def test_what_its_bytes_do_not_prove_is_counted(
    engine: Engine, model: Path, counts: Counts, fields: dict[str, Any]
) -> None:
    async with running(engine, model) as run:
        text = "the lazy dog " * 20_000
        client = await run.client(completion(**({"text": text} | fields)))
        await counts.say(300)
        await client.events(1)

        assert client.current.status == 200
        assert run.counting["refused_uncounted"] == 0


async def test_a_chat_whose_template_leaves_the_text_out_is_not_refused_by_its_bytes(
    engine: Engine, tmp_path: Path, counts: Counts
) -> None:
    short = "{% for message in messages %}<|im_start|>{{ message.content[:100] }}<|im_end|>{% endfor %}"
    async with running(engine, write_model(tmp_path, template=short)) as run:
        client = await run.client(chat("the lazy dog " * 20_000))
        await counts.say(40)
        await client.events(1)

        assert client.current.status == 200
        assert run.counting["refused_uncounted"] == 0


async def test_nobody_is_refused_by_a_tokenizer_that_has_not_agreed_yet(
    engine: Engine, model: Path, counts: Counts
) -> None:
    async with running(engine, model, trusted=False) as run:
        answer = await run.fetch(completion("the lazy dog " * 20_000, {"prompt_tokens": 300, "chunks": 1}))

        assert answer.status == 200


async def test_a_short_prompt_is_not_even_looked_at(
    engine: Engine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    monkeypatch.setattr(Uncounted, "_is_hopeless", lambda self, shape: looked.append(1))
    monkeypatch.setattr(Uncounted, "_goes_on_bound", lambda self, shape, waiting: looked.append(2))
    async with running(engine, model) as run:
        for data in (completion(script={}), chat(script={})):
            assert (await run.fetch(data)).status == 200

    assert looked == []


def test_what_takes_long_to_write_out_is_not_written_on_the_loop(tokenizer: PromptCounter) -> None:
    def most(tools: list[Any] | None = None, arguments: str = "{}", **options: Any) -> object:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "assistant", "content": "x", "tool_calls": [call]}]
        shape: Any = SimpleNamespace(parts=(Conversation(messages, tools or [], options),))
        return most_of(tokenizer.proofs, shape)

    def tool(values: int) -> dict[str, Any]:
        parameters = {"type": "object", "enum": [[number] for number in range(values // 2)]}
        return {"type": "function", "function": {"name": "f", "parameters": parameters}}

    assert most([tool(30)] * 50, json.dumps({"text": "a, b" * 1_000}))
    assert most([tool(VALUES_MAX)]) is None
    assert most([tool(30)] * 200) is None
    assert most(documents=[{"text": "a"}] * VALUES_MAX) is None
    for arguments in ("[" * 99_999, " " + "[0]," * VALUES_MAX, '{"a":[' + "{}," * VALUES_MAX):
        assert most(arguments=arguments) is None
