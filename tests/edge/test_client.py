"""The client half against a real httpx, the real SDKs and a server that says what the test wants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import CHAT_ANSWER, MESSAGE_ANSWER, Said, Server, refusal, serving

from kvgate.client import (
    AsyncRetryTransport,
    Retries,
    RetryTransport,
    anthropic_client,
    async_anthropic_client,
    async_openai_client,
    openai_client,
)
from kvgate.edge.client.advice import RETRIED, Advice, advice, cap_that_fits, with_cap
from kvgate.edge.client.transport import BACKOFF_FIRST, BACKOFF_MAX, SPREAD

BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4000}
GOOD = Said(200, CHAT_ANSWER)


def post(server: Server, retries: Retries, body: Any = BODY) -> tuple[httpx.Response, list[float]]:
    """The answer, and the waits that were asked for; nobody really waits."""
    waits: list[float] = []
    transport = RetryTransport(retries=retries)
    transport.sleep = waits.append
    with httpx.Client(transport=transport) as client:
        return client.post(server.url + "/v1/chat/completions", json=body), waits


async def apost(server: Server, retries: Retries, body: Any = BODY) -> tuple[httpx.Response, list[float]]:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    transport = AsyncRetryTransport(retries=retries)
    transport.sleep = sleep
    async with httpx.AsyncClient(transport=transport) as client:
        return await client.post(server.url + "/v1/chat/completions", json=body), waits


Post = Callable[[Server, Retries], tuple[httpx.Response, list[float]]]


@pytest.fixture(params=["sync", "async"])
def send(request: pytest.FixtureRequest) -> Post:
    if request.param == "sync":
        return post
    return lambda server, retries: asyncio.run(apost(server, retries))


def test_a_refused_request_comes_back_at_its_slot_to_the_millisecond(send: Post) -> None:
    with serving(refusal(1234), refusal(60_000), GOOD) as server:
        response, waits = send(server, Retries())
    assert (response.status_code, waits) == (200, [1.234, 60.0])
    assert [seen.body for seen in server.seen] == [BODY] * 3


def test_all_tries_are_one_request_to_the_server(send: Post) -> None:
    with serving(refusal(), refusal(), GOOD) as server:
        send(server, Retries())
    keys = {seen.headers["idempotency-key"] for seen in server.seen}
    assert len(keys) == 1
    assert [seen.headers.get("x-stainless-retry-count") for seen in server.seen] == [None, "1", "2"]


def test_two_requests_are_not_taken_for_one() -> None:
    with serving(GOOD, GOOD) as server:
        post(server, Retries())
        post(server, Retries())
    assert len({seen.headers["idempotency-key"] for seen in server.seen}) == 2


def test_a_moment_given_to_everybody_is_spread_upwards_only(send: Post) -> None:
    with serving(Said(429, {}, {"Retry-After": "10"}), GOOD) as server:
        _, waits = send(server, Retries())
    assert 10.0 <= waits[0] <= 10.0 * (1 + SPREAD)


def test_without_a_named_moment_waits_grow_and_differ(send: Post) -> None:
    with serving(*[Said(503)] * 7, GOOD) as server:
        response, waits = send(server, Retries())
    assert response.status_code == 200
    for n, wait in enumerate(waits, start=1):
        assert 0 <= wait <= min(BACKOFF_MAX, BACKOFF_FIRST * 2**n)
    assert len(set(waits)) == 7


@pytest.mark.parametrize(
    "final",
    [
        Said(413, {"error": {"message": "never"}}, {"x-should-retry": "false"}),
        Said(429, {}, {"x-should-retry": "false", "Retry-After": "1"}),
        Said(400),
        Said(401),
    ],
)
def test_what_can_never_succeed_is_not_tried_again(send: Post, final: Said) -> None:
    with serving(final) as server:
        response, waits = send(server, Retries())
    assert (response.status_code, waits, len(server.seen)) == (final.status, [], 1)


def test_the_last_refusal_is_handed_on_readable(send: Post) -> None:
    with serving(*[refusal(text="still full")] * 3) as server:
        response, waits = send(server, Retries(tries=3))
    assert response.status_code == 429
    assert response.json()["error"]["message"] == "still full"
    assert len(waits) == 2


def test_a_moment_beyond_the_patience_is_not_waited_for(send: Post) -> None:
    with serving(refusal(50_000)) as server:
        response, waits = send(server, Retries(patience=30.0))
    assert (response.status_code, waits) == (429, [])


def test_a_refused_connection_is_tried_again_and_then_raised() -> None:
    waits: list[float] = []
    transport = RetryTransport(retries=Retries(tries=3))
    transport.sleep = waits.append
    with serving() as server:
        pass  # nobody listens there any more
    with httpx.Client(transport=transport) as client, pytest.raises(httpx.ConnectError):
        client.post(server.url, json=BODY)
    assert len(waits) == 2


def test_an_answer_that_breaks_off_after_its_head_is_not_sent_again(send: Post) -> None:
    with serving(Said(200, b"data: {}\n\n" * 50, {"content-type": "text/event-stream"}, cut=100)) as server:
        with pytest.raises(httpx.RemoteProtocolError):
            send(server, Retries())
        assert len(server.seen) == 1


def test_the_smaller_cap_is_sent_at_once(send: Post) -> None:
    with serving(refusal(9000, fits=700), GOOD) as server:
        response, waits = send(server, Retries(shrink_cap=True))
    assert (response.status_code, waits) == (200, [])
    assert [seen.body["max_tokens"] for seen in server.seen] == [4000, 700]
    assert server.seen[1].body["messages"] == BODY["messages"]


def test_after_a_smaller_cap_that_came_too_late_the_own_cap_waits_as_told(send: Post) -> None:
    with serving(refusal(9000, fits=700), refusal(3000), GOOD) as server:
        _, waits = send(server, Retries(shrink_cap=True))
    assert waits == [3.0]
    assert [seen.body["max_tokens"] for seen in server.seen] == [4000, 700, 4000]


@pytest.mark.parametrize(
    ("retries", "fits"),
    [(Retries(), 700), (Retries(shrink_cap=True), 100), (Retries(shrink_cap=True), None)],
)
def test_the_cap_stays_where_shrinking_is_not_wanted(send: Post, retries: Retries, fits: int | None) -> None:
    with serving(refusal(1000, fits=fits), GOOD) as server:
        _, waits = send(server, retries)
    assert waits == [1.0]
    assert [seen.body["max_tokens"] for seen in server.seen] == [4000, 4000]


async def test_cancelling_ends_the_wait() -> None:
    with serving(refusal(60_000)) as server:
        async with httpx.AsyncClient(transport=AsyncRetryTransport()) as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await client.post(server.url, json=BODY)
        assert len(server.seen) == 1


def test_the_openai_client_waits_as_told_and_shows_the_refusal() -> None:
    with serving(refusal(30), GOOD, *[refusal(30, text="needs 9000 tokens")] * 2) as server:
        client = openai_client(base_url=server.url + "/v1", api_key="k", retries=Retries(tries=2))
        answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        assert answer.choices[0].message.content == "hello"
        with pytest.raises(openai.RateLimitError, match="needs 9000 tokens"):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        client.close()
    assert len(server.seen) == 4
    assert server.gaps[0] >= 0.030


async def test_the_async_openai_client_shrinks_its_cap() -> None:
    with serving(refusal(60_000, fits=512), GOOD) as server:
        async with async_openai_client(
            base_url=server.url + "/v1", api_key="k", retries=Retries(shrink_cap=True)
        ) as client:
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=4096
            )
    assert [seen.body["max_completion_tokens"] for seen in server.seen] == [4096, 512]


def test_the_anthropic_client_waits_as_told_and_shows_the_refusal() -> None:
    error = {"type": "rate_limit_error", "message": "needs 9000 tokens"}
    full = Said(429, {"type": "error", "error": error}, refusal(30).headers)
    with serving(full, Said(200, MESSAGE_ANSWER), full, full) as server:
        client = anthropic_client(base_url=server.url, api_key="k", retries=Retries(tries=2))
        wanted: Any = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        assert client.messages.create(**wanted).id == "m1"
        with pytest.raises(anthropic.RateLimitError, match="needs 9000 tokens"):
            client.messages.create(**wanted)
        client.close()
    assert server.gaps[0] >= 0.030


async def test_the_async_anthropic_client_comes_back() -> None:
    with serving(refusal(20), Said(200, MESSAGE_ANSWER)) as server:
        async with async_anthropic_client(base_url=server.url, api_key="k") as client:
            answer = await client.messages.create(
                model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}]
            )
    assert answer.id == "m1"


@pytest.mark.parametrize(
    ("headers", "wait"),
    [
        ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
        ({"retry-after": "9"}, 9.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:30 GMT"}, 30.0),
        ({"retry-after": "Wed, 31 Dec 1969 00:00:30 GMT"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after-ms": "x", "retry-after": "2"}, 2.0),
        ({}, None),
    ],
)
def test_the_named_moment_is_read_as_servers_write_it(headers: dict[str, str], wait: float | None) -> None:
    assert advice(429, headers, 0.0) == Advice(True, wait)


@given(st.integers(200, 599), st.sampled_from([None, "true", "false"]))
def test_the_word_of_the_server_stands_before_the_status(status: int, said: str | None) -> None:
    headers = {} if said is None else {"x-should-retry": said}
    expected = status >= 400 and (said == "true" if said else status in RETRIED)
    assert advice(status, headers, 0.0).again is expected


@pytest.mark.parametrize(
    ("body", "fits"),
    [
        (b'{"error": {"output_cap_that_fits": 5}}', 5),
        (b'{"error": "full", "output_cap_that_fits": 5}', 5),
        (b'{"error": {"output_cap_that_fits": null}}', None),
        (b'{"error": {"output_cap_that_fits": true}}', None),
        (b"[1]", None),
        (b"<html>", None),
    ],
)
def test_the_cap_that_fits_is_read_from_every_shape(body: bytes, fits: int | None) -> None:
    assert cap_that_fits(body) == fits


@pytest.mark.parametrize(
    ("body", "path", "expected"),
    [
        (b'{"max_tokens": 9}', "/v1/chat/completions", b'{"max_tokens": 5}'),
        (b'{"max_tokens": 4}', "/v1/chat/completions", None),
        (b'{"a": 1}', "/v1/completions", b'{"a": 1, "max_tokens": 5}'),
        (b'{"a": 1}', "/v1/responses", b'{"a": 1, "max_output_tokens": 5}'),
        (b'{"n_predict": -1}', "/completion", b'{"n_predict": 5}'),
        (b"not json", "/v1/completions", None),
    ],
)
def test_a_cap_is_only_ever_made_smaller(body: bytes, path: str, expected: bytes | None) -> None:
    assert with_cap(body, path, 5) == expected


def test_patience_that_makes_no_sense_is_an_error() -> None:
    for wrong in ({"tries": 0}, {"patience": -1.0}, {"smallest_cap": 0}):
        with pytest.raises(ValueError, match="at least"):
            Retries(**wrong)  # type: ignore[arg-type]
