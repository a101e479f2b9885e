"""The table of states, its drawing, and a running gateway agree: each arrow is driven, and no other."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from harness import COMPLETIONS, Client, Engine, payload, request

from kvgate.config import Settings, UpstreamSettings, at
from kvgate.core.records import Misuse, PoolFacts
from kvgate.edge.counting.waiting import Waiting
from kvgate.edge.gateway import Gateway
from kvgate.edge.relay import exchange, life
from kvgate.edge.relay.finished import Finished
from kvgate.edge.relay.state import NEXT, State
from kvgate.edge.upstreams.routing import Fleet
from kvgate.edge.upstreams.upstream import Upstream

# Its tests put things in place of methods.
pytestmark = pytest.mark.as_python

DOC = Path(__file__).parents[2] / "docs" / "lifecycle.md"
Move: TypeAlias = tuple[State, State]
S = State
ALL: set[Move] = {(here, there) for here, next_ones in NEXT.items() for there in next_ones}

# Token ids need no count at the engine; 9 and 82 reach the 90 usable cells.
IDS = payload(messages=..., prompt=[1] * 9, max_tokens=82)
SLOW = {"chunks": 200, "interval_ms": 20}
CHAT_ALL = {"max_tokens": 81}


def ids(script: dict[str, Any] | None = None, **fields: Any) -> bytes:
    return request(COMPLETIONS, IDS | fields, script)


class Running:
    """A gateway in this loop, and what moves its requests made."""

    def __init__(self, gateway: Gateway, engine: Engine, moves: list[Move]) -> None:
        self.gateway, self.engine, self.moves = gateway, engine, moves
        self.finished: list[Finished] = []
        gateway.observers.append(self.finished.append)
        self._clients: list[Client] = []

    async def client(self, data: bytes) -> Client:
        client = await Client.connect(self.gateway.port)
        self._clients.append(client)
        client.send(data)
        return client

    async def streaming(self, data: bytes | None = None) -> Client:
        client = await self.client(ids(SLOW) if data is None else data)
        await client.events(1)
        assert client.current.status == 200
        return client

    async def until(self, *move: State) -> None:
        async with asyncio.timeout(10):
            while move not in self.moves:  # noqa: ASYNC110 - moves are made by callbacks
                await asyncio.sleep(0.002)

    async def close(self) -> None:
        for client in self._clients:
            client.cut()
        async with asyncio.timeout(10):
            while len(self.gateway.gate.ledger) or self.gateway.gate.line:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await self.gateway.stop()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    started = Engine()
    yield started
    started.kill()


@contextlib.asynccontextmanager
async def running(
    upstream: Engine, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> AsyncIterator[Running]:
    moves: list[Move] = []
    move = life.Life._to

    def noted(self: life.Life, state: State) -> None:
        before = self.state
        move(self, state)
        moves.append((before, state))

    monkeypatch.setattr(life.Life, "_to", noted)
    wanted: dict[str, Any] = {
        "upstreams": at(f"http://127.0.0.1:{upstream.port}"),
        "listen_port": 0,
        "abort_grace": 0.05,
        "max_wait": 0.0,
        "drain_timeout": 0.2,
        "allow_paths": ("/echo",),
    }
    facts = PoolFacts(total_blocks=100, block_size=1, context=100)
    gateway = Gateway(Settings(**(wanted | settings)), facts)
    await gateway.start()
    run = Running(gateway, upstream, moves)
    try:
        yield run
    finally:
        await run.close()
    assert gateway.gate.ledger.double_releases == 0
    assert set(moves) <= ALL


# One way to make each move. The fixture's end check holds for all of them.


async def a_chat(run: Running) -> None:
    assert (await (await run.client(request())).response()).status == 200


async def token_ids(run: Running) -> None:
    assert (await (await run.client(ids())).response()).status == 200


async def an_allowed_path(run: Running) -> None:
    await run.gateway.pool.fetch(b"GET /health HTTP/1.1\r\nhost: t\r\n\r\n")
    idle = run.gateway.pool.take_idle()
    assert idle is not None
    idle.abort()
    answer = await (await run.client(request("/echo", b"x"))).response()
    assert (answer.status, answer.body) == (200, b"x")


async def an_allowed_path_on_an_open_connection(run: Running) -> None:
    await run.gateway.pool.fetch(b"GET /health HTTP/1.1\r\nhost: t\r\n\r\n")
    assert (await (await run.client(request("/echo", b"x"))).response()).status == 200


async def a_bad_body(run: Running) -> None:
    assert (await (await run.client(request(body=b"[]"))).response()).status == 400


async def no_count(run: Running) -> None:
    assert (await (await run.client(request(script={"count_fault": "500"}))).response()).status == 503


async def no_room(run: Running) -> None:
    await run.streaming()
    assert (await (await run.client(ids())).response()).status == 429


async def a_waiter_that_gets_room(run: Running) -> None:
    holder = await run.streaming()
    waiter = await run.client(ids())
    await run.until(S.COUNTED, S.WAITING)
    holder.cut()
    assert (await waiter.response()).status == 200


async def a_waiter_that_leaves(run: Running) -> None:
    await run.streaming()
    waiter = await run.client(ids())
    await run.until(S.COUNTED, S.WAITING)
    waiter.cut()
    await run.until(S.WAITING, S.RELEASED)
    assert len(run.gateway.gate.line) == 0


async def an_open_connection(run: Running) -> None:
    await token_ids(run)
    await token_ids(run)


async def a_defect_of_the_gate(run: Running) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "enforce", lambda *_: 1 / 0)
        client = await run.client(ids())
        await run.until(S.ADMITTED, S.RELEASED)
    client.cut()


async def no_engine(run: Running) -> None:
    pool = run.gateway.pool

    async def refused() -> Any:
        raise exchange.EngineUnavailable("refused")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "take_idle", lambda: None)
        patch.setattr(pool, "connect", refused)
        assert (await (await run.client(ids())).response()).code == "engine_unavailable"


async def a_stale_connection(run: Running) -> None:
    await token_ids(run)
    connection = run.gateway.pool.take_idle()
    assert connection is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.gateway.pool, "take_idle", lambda: connection)
        # The engine closes it just as it is used: what it would send is never read.
        connection.transport.pause_reading()
        run.moves.clear()
        client = await run.client(ids())
        await run.until(S.ADMITTED, S.SENDING)
        connection._fail("closed while idle")
        assert (await client.response()).status == 200


async def an_engine_that_breaks_off_before_its_answer(run: Running) -> None:
    answer = await (await run.client(ids({"fault": "close_before_headers"}))).response()
    assert answer.code == "engine_unavailable"


async def a_path_without_a_price_that_is_left(run: Running) -> None:
    connection = await run.gateway.pool.connect()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.gateway.pool, "take_idle", lambda: connection)
        connection.transport.pause_reading()
        client = await run.client(request("/echo", b"x"))
        await run.until(S.RECEIVED, S.SENDING)
        client.cut()
        await run.until(S.SENDING, S.RELEASED)


async def a_stream_that_is_cut(run: Running) -> None:
    (await run.streaming()).cut()
    await run.until(S.STREAMING, S.DRAINING)
    assert run.gateway.gate.ledger.reserved_blocks == 90
    await run.until(S.DRAINING, S.RELEASED)
    assert run.gateway.gate.ledger.reserved_blocks == 0


@contextlib.contextmanager
def another_engine_has_the_model(run: Running) -> Iterator[pytest.MonkeyPatch]:
    """While the first one cannot be reached."""
    gateway = run.gateway
    first, settings = gateway.upstreams[0], gateway.settings
    other = Upstream(UpstreamSettings(first.url, label="other"), settings, first.facts)
    other.open(gateway.loop, settings, None)
    other.use(settings, None)
    other.list_models(first.model_objects)
    gateway.upstreams.append(other)
    gateway.fleet = Fleet(gateway.upstreams)

    async def refused() -> Any:
        first.pool.is_up = False
        raise exchange.EngineUnavailable("refused")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first.pool, "take_idle", lambda: None)
        patch.setattr(first.pool, "connect", refused)
        yield patch
    assert (first.gate.admissions, other.gate.admissions) == (1, 1)
    assert first.gate.ledger.reserved_blocks == other.gate.ledger.reserved_blocks == 0


async def an_engine_that_is_gone_while_another_one_has_the_model(run: Running) -> None:
    with another_engine_has_the_model(run):
        assert (await (await run.client(ids())).response()).status == 200


async def an_engine_that_is_gone_while_only_a_bound_is_known(run: Running) -> None:
    bounds = [None, (20,)]
    with another_engine_has_the_model(run) as patch:
        patch.setattr(Waiting, "most", lambda _: bounds.pop())
        answer = await (await run.client(request())).response()
        assert (answer.status, answer.header("x-kvgate-count-source")) == (200, "engine")
    assert run.gateway.counter.on_bound == 1


Drive: TypeAlias = Callable[[Running], Awaitable[None]]
DRIVES: dict[Move, tuple[Drive, dict[str, Any]]] = {
    (S.RECEIVED, S.COUNTING): (a_chat, {}),
    (S.RECEIVED, S.COUNTED): (token_ids, {}),
    (S.RECEIVED, S.CONNECTING): (an_allowed_path, {}),
    (S.RECEIVED, S.SENDING): (an_allowed_path_on_an_open_connection, {}),
    (S.RECEIVED, S.RELEASED): (a_bad_body, {}),
    (S.COUNTING, S.COUNTED): (a_chat, {}),
    (S.COUNTING, S.RELEASED): (no_count, {}),
    (S.COUNTED, S.ADMITTED): (token_ids, {}),
    (S.COUNTED, S.WAITING): (a_waiter_that_gets_room, {"max_wait": 10.0}),
    (S.COUNTED, S.RELEASED): (no_room, {"max_wait": 0.0}),
    (S.WAITING, S.ADMITTED): (a_waiter_that_gets_room, {"max_wait": 10.0}),
    (S.WAITING, S.RELEASED): (a_waiter_that_leaves, {"max_wait": 10.0}),
    (S.ADMITTED, S.CONNECTING): (no_engine, {}),
    (S.ADMITTED, S.SENDING): (an_open_connection, {}),
    (S.ADMITTED, S.RELEASED): (a_defect_of_the_gate, {}),
    (S.CONNECTING, S.SENDING): (an_allowed_path, {}),
    (S.CONNECTING, S.RELEASED): (no_engine, {}),
    (S.CONNECTING, S.COUNTING): (an_engine_that_is_gone_while_only_a_bound_is_known, {}),
    (S.CONNECTING, S.COUNTED): (an_engine_that_is_gone_while_another_one_has_the_model, {}),
    (S.SENDING, S.STREAMING): (token_ids, {}),
    (S.SENDING, S.CONNECTING): (a_stale_connection, {}),
    (S.SENDING, S.DRAINING): (an_engine_that_breaks_off_before_its_answer, {}),
    (S.SENDING, S.RELEASED): (a_path_without_a_price_that_is_left, {}),
    (S.STREAMING, S.RELEASED): (token_ids, {}),
    (S.STREAMING, S.DRAINING): (a_stream_that_is_cut, {}),
    (S.DRAINING, S.RELEASED): (a_stream_that_is_cut, {}),
}


@pytest.mark.parametrize("move", DRIVES, ids=lambda m: f"{m[0].value}-{m[1].value}")
async def test_each_move_happens_in_a_running_gateway(
    move: Move, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive, settings = DRIVES[move]
    async with running(engine, monkeypatch, **settings) as run:
        await drive(run)
        await run.until(*move)


def test_there_is_a_drive_for_every_move_of_the_table() -> None:
    assert set(DRIVES) == ALL


def test_the_drawing_is_the_table() -> None:
    (drawing,) = re.findall(r"```mermaid\nstateDiagram-v2\n(.*?)```", DOC.read_text(encoding="utf-8"), re.S)
    drawn = re.findall(r"^    (\S+) --> (\S+)", drawing, re.M)
    assert drawn[0] == ("[*]", State.RECEIVED.value)
    assert drawn[-1] == (State.RELEASED.value, "[*]")
    assert sorted(drawn[1:-1]) == sorted((here.value, there.value) for here, there in ALL)


def test_a_move_that_is_not_in_the_table_is_a_defect() -> None:
    request = life.Life.__new__(life.Life)
    for here in State:
        for there in State:
            if (here, there) not in ALL:
                request.state = here
                with pytest.raises(Misuse):
                    request._to(there)


async def test_what_was_counted_before_the_engine_was_found_gone_is_not_counted_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(engine, monkeypatch) as run:
        first = run.gateway.upstreams[0]
        connect, calls = first.pool.connect, 0

        async def only_to_count() -> Any:
            nonlocal calls
            calls += 1
            if calls == 1:
                return await connect()
            await run.until(S.ADMITTED, S.CONNECTING)
            while not first.counter.settled:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            first.pool.is_up = False
            raise exchange.EngineUnavailable("refused")

        with another_engine_has_the_model(run) as patch:
            patch.setattr(first.pool, "connect", only_to_count)
            patch.setattr(Waiting, "most", lambda _: (20,))
            answer = await (await run.client(request(script={"prompt_tokens": 7}))).response()

        told = [answer.header(f"x-kvgate-{name}") for name in ("count-source", "reserved-blocks")]
        assert (answer.status, told) == (200, ["engine", "22"])
        assert run.gateway.upstreams[1].counter.snapshot()["engine_calls"] == 0


async def test_a_client_that_leaves_during_the_release_itself_changes_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FC-17: a second end from inside the first, at each way to end."""
    async with running(engine, monkeypatch, max_wait=10.0) as run:

        def leave(_: Finished) -> None:
            for client in list(run.gateway.clients):
                if client.exchange is not None and client.exchange.is_over:
                    client.shut()

        run.gateway.observers.append(leave)
        for script in ({}, {"fault": "close_mid"}, {"fault": "close_before_headers"}, {"fault": "500"}):
            for _ in range(20):
                client = await run.client(ids(script))
                await asyncio.wait_for(client.closed.wait(), 10)
        await asyncio.sleep(0.1)  # the abort grace
        assert run.gateway.gate.ledger.reserved_blocks == 0
        assert len(run.finished) == 80


async def test_what_was_used_is_told_beside_what_was_reserved(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(engine, monkeypatch, engine="vllm") as run:
        body = {"max_tokens": 20}
        for stream in (True, False):
            client = await run.client(ids({"chunks": 5, "prompt_tokens": 9}, stream=stream, **body))
            answer = await client.response()
            assert (answer.status, answer.complete) == (200, True)
            assert (b'"usage"' in answer.body) is not stream
            told = run.finished[-1]
            assert (told.outcome, told.used_tokens, told.engine_prompt) == ("completed", 14, 9)
            assert (told.counted_prompt, told.priced_tokens, told.reserved_tokens) == (9, 29, 28)
        (await run.streaming(ids(SLOW, **body))).cut()
        await run.until(S.STREAMING, S.DRAINING)
        assert run.finished[-1].used_tokens is None
