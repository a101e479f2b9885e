"""A storm against a server that says what the test wants: every kind of client, every figure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest

from kvgate.lab import storm_load
from kvgate.lab.sse_client import Answer
from kvgate.lab.storm import Outcome
from kvgate.lab.storm_load import Follow, Load, comes_back_in, loads
from kvgate.lab.storm_plan import Arrivals, Client, Planned, Recipe, parse_clients, plan
from kvgate.lab.storm_report import Quantiles, herd_of, jain, report

EVENT = b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":null}]}\n\n'
END = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


def good(tokens: int = 2, wait_ms: int = 0) -> bytes:
    body = EVENT * tokens + END
    head = b"HTTP/1.1 200 OK\r\nx-kvgate-wait-ms: %d\r\ncontent-length: %d\r\n\r\n" % (wait_ms, len(body))
    return head + body


def full(milliseconds: int = 20, reason: bytes = b"kv_capacity") -> bytes:
    return (
        b"HTTP/1.1 429 Too Many Requests\r\nretry-after-ms: %d\r\nx-kvgate-reason: %b\r\n"
        b"content-length: 0\r\n\r\n" % (milliseconds, reason)
    )


@asynccontextmanager
async def answering(*answers: bytes | None) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server; None stands for silence. Gives its address and the heads that it has seen."""
    left, heads = list(answers), []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        answer = left.pop(0)
        if answer is None:
            await reader.read()
        else:
            writer.write(answer)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/chat/completions", heads


def one(client: Client = Client.OBEYING) -> list[Follow]:
    return loads([Planned(0, 0.0, 10, 20, client, 0)])


async def test_an_obeying_client_comes_back_and_its_wait_is_measured() -> None:
    async with answering(full(50), full(50), good(3, wait_ms=200)) as (url, heads):
        load = Load(url, one(), Arrivals.CLOSED)
        await load.run()
    figures = report(load)
    assert (figures.finished, figures.retries, figures.refusals) == (1, 2, {"kv_capacity": 2})
    assert figures.tokens_whole == 3
    assert figures.goodput_over_offered == 3 / 20
    assert figures.attempts_per_success == 3
    assert figures.wait is not None
    assert figures.wait.p50 >= 0.1 + 0.2
    assert figures.between_tokens is not None
    assert len({head.split(b"Idempotency-Key: ")[1].split(b"\r\n")[0] for head in heads}) == 1
    assert b"x-stainless-retry-count: 2" in heads[2]


async def test_a_stopped_storm_is_over_at_once_and_reports_what_was() -> None:
    async with answering(good(), None, None) as (url, heads):
        load = Load(url, loads(plan(Recipe(3, 60.0))), Arrivals.CLOSED, concurrency=1)

        def stop_in_the_second(load: Load) -> None:
            if len(heads) == 2:
                load.stop()

        await load.run(stop_in_the_second)
    figures = report(load)
    assert figures.was_stopped
    assert (figures.asked, figures.finished, figures.left) == (2, 1, 1)


async def test_a_storm_ends_by_itself_when_its_time_is_over() -> None:
    async with answering(None) as (url, _):
        load = Load(url, one(), Arrivals.CLOSED, seconds=0.1, grace=0.1)
        await load.run()
    assert report(load).left == 1


async def test_an_open_storm_sends_at_its_moments() -> None:
    planned = [Planned(n, 0.1 * n, 10, 20, Client.OBEYING, n % 2) for n in range(3)]
    async with answering(*[good()] * 3) as (url, heads):
        load = Load(url, loads(planned), Arrivals.POISSON, keys=("k0", "k1"))
        await load.run()
    for follow in load.follows:
        assert follow.asked is not None
        assert follow.asked >= follow.planned.at
    assert [head.split(b"Bearer ")[1][:2] for head in heads] == [b"k0", b"k1", b"k0"]
    assert report(load).served_by_key == {0: (2, 2), 1: (1, 1)}
    assert report(load).fairness == 1.0


async def test_a_client_that_gives_up_goes_at_a_refusal_and_when_nothing_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storm_load, "PATIENCE", 0.1)
    for answer, outcome in ((full(), Outcome.REFUSED), (None, Outcome.LEFT), (good(), Outcome.FINISHED)):
        async with answering(answer) as (url, _):
            load = Load(url, one(Client.GIVING_UP), Arrivals.CLOSED)
            await load.run()
        assert load.follows[0].stream.outcome is outcome


async def test_a_stream_that_is_cut_died_and_is_named() -> None:
    async with answering(good()[:-20], b"HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n") as (url, _):
        load = Load(url, loads(plan(Recipe(2, 60.0))), Arrivals.CLOSED, concurrency=1)
        await load.run()
    figures = report(load)
    assert (figures.died, figures.tokens_thrown_away, len(figures.deaths)) == (2, 2, 2)
    assert figures.attempts_per_success is None


@pytest.mark.parametrize(
    ("client", "headers", "refusals", "expected"),
    [
        (Client.OBEYING, {"retry-after": "61"}, 9, 61.0),
        (Client.SDK, {"retry-after": "60"}, 2, 60.0),
        (Client.SDK, {"retry-after": "60"}, 3, None),
        (Client.GIVING_UP, {"retry-after": "1"}, 1, None),
        (Client.OBEYING, {"retry-after": "1", "x-should-retry": "false"}, 1, None),
        (Client.STUBBORN, {"retry-after": "1", "x-should-retry": "false"}, 1, None),
    ],
)
def test_each_kind_takes_a_refusal_in_its_way(
    client: Client, headers: dict[str, str], refusals: int, expected: float | None
) -> None:
    assert comes_back_in(client, Answer(429, headers), refusals, Random(1)) == expected


def test_an_sdk_comes_back_early_where_it_was_told_more_than_a_minute_or_nothing() -> None:
    for headers in ({"retry-after": "61"}, {}):
        wait = comes_back_in(Client.SDK, Answer(429, headers), 1, Random(1))
        assert wait is not None
        assert 0.375 <= wait <= 0.5


def test_a_stubborn_client_hammers_whatever_it_is_told() -> None:
    wait = comes_back_in(Client.STUBBORN, Answer(429, {"retry-after": "30"}), 50, Random(1))
    assert wait is not None
    assert 0.1 <= wait <= 0.3
    assert comes_back_in(Client.STUBBORN, Answer(413), 1, Random(1)) is None


def test_the_index_of_fairness_is_jains() -> None:
    assert jain([1.0, 1.0, 1.0]) == 1.0
    assert jain([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert jain([1.0]) is None
    assert jain([0.0, 0.0]) is None


def test_a_herd_is_found_wherever_it_begins() -> None:
    assert herd_of([]) == (None, 0)
    assert herd_of([0.0, 0.05, 0.09, 0.1, 0.5]) == (0.6, 3)
    assert herd_of([0.25, 0.26, 0.34, 9.0]) == (0.75, 3)


def test_the_quantiles_of_nothing_are_nothing() -> None:
    assert Quantiles.of([]) is None
    assert Quantiles.of([1.0]) == Quantiles(1.0, 1.0, 1.0, 1.0)


async def test_a_mix_of_clients_comes_to_rest() -> None:
    recipe = Recipe(12, 60.0, clients=parse_clients("obeying,sdk,stubborn,giving-up"), seed=3)
    async with answering(*[full(30)] * 6, *[good()] * 20) as (url, _):
        load = Load(url, loads(plan(recipe)), Arrivals.CLOSED)
        await load.run()
    figures = report(load)
    assert figures.finished + figures.refused == 12
    assert figures.as_dict()["refusals"] == {"kv_capacity": 6}
