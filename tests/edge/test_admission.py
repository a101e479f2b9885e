"""Who gets in, at what price, and what the engine is told."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from harness import CHAT, COMPLETIONS, Client, Response, Stack, payload, request

HELD = {"chunks": 20, "interval_ms": 150}


@pytest.fixture(scope="module")
def small() -> Iterator[Stack]:
    """180 usable tokens in a context of 150, and one path that is let through."""
    started = Stack("--allow-path", "/v1/embeddings", total_blocks=200, context=150)
    yield started
    started.stop()


def retry_after(answer: Response) -> int:
    """The header, after checking that all places name the same moment."""
    seconds = answer.header("retry-after") or ""
    milliseconds = int(answer.header("retry-after-ms") or 0)
    assert seconds.isdigit()
    assert 1 <= int(seconds) <= 60
    assert int(seconds) == math.ceil(milliseconds / 1000)
    assert answer.json["retry_after_seconds"] == int(seconds)
    assert answer.json["error"]["retry_after_seconds"] == int(seconds)
    return int(seconds)


async def test_of_500_simultaneous_arrivals_with_room_for_10_exactly_10_are_admitted(small: Stack) -> None:
    """FC-29, FC-40: and each of the other 490 is told when to come back."""
    await asyncio.to_thread(small.engine.stats, reset=True)
    clients = [await Client.connect(small.port) for _ in range(500)]
    data = request(body=payload(max_tokens=16), script=HELD | {"prompt_tokens": 3})  # 18 each
    for client in clients:
        client.send(data)
    refused: list[Response] = []
    while len(refused) < 490:
        await asyncio.gather(*(client.events(0) for client in clients))
        refused = [c.responses.get_nowait() for c in clients if not c.responses.empty()]
    admitted = [client for client in clients if client.began]
    assert len(admitted) == 10
    pool = await asyncio.to_thread(small.pool)
    assert (pool["reserved_blocks"], pool["live"], pool["usable_blocks"]) == (180, 10, 180)
    assert {a.status for a in refused} == {429}
    assert {a.code for a in refused} == {"kv_capacity"}
    assert all(retry_after(a) for a in refused)
    for client in admitted:
        answer = await client.response()
        assert (answer.status, answer.complete) == (200, True)
    assert (await asyncio.to_thread(small.engine.stats))["max_concurrent"] == 10
    for client in clients:
        await client.close()
    await small.assert_idle()


CAPS: dict[str, tuple[dict[str, Any], int]] = {
    "set": ({"max_tokens": 7}, 7),
    "unset": ({"max_tokens": ...}, 140),
    "null": ({"max_tokens": None}, 140),
    "too large": ({"max_tokens": 100_000}, 140),
    "max_completion_tokens": ({"max_tokens": ..., "max_completion_tokens": 9}, 9),
    "max_completion_tokens null": ({"max_tokens": ..., "max_completion_tokens": None}, 140),
    "n_predict of llama.cpp": ({"max_tokens": ..., "n_predict": 11}, 11),
}


@pytest.mark.parametrize("name", CAPS)
async def test_the_engine_is_given_the_cap_that_was_reserved(small: Stack, name: str) -> None:
    """FC-13: also where the client asks for more than the context, or for nothing."""
    fields, cap = CAPS[name]
    await asyncio.to_thread(small.engine.stats, reset=True)
    answer = await small.fetch(request(body=payload(False, **fields), script={"prompt_tokens": 10}))
    assert answer.status == 200
    assert answer.header("x-kvgate-output-cap") == str(cap)
    assert answer.header("x-kvgate-reserved-blocks") == str(10 + cap - 1)
    assert (answer.header("x-kvgate-wait-ms") or "").isdigit()
    (seen,) = await asyncio.to_thread(small.engine.generations_seen)
    body = json.loads(seen["body"])
    caps = [body[f] for f in ("max_tokens", "max_completion_tokens", "n_predict") if f in body]
    assert caps
    assert set(caps) == {cap}
    await small.until(reserved_blocks=0)


PROMPTS: dict[str, tuple[Any, int]] = {
    "text": ("abcdefgh" * 4, 8 + 4),
    "token ids": ([5, 6, 7], 3 + 4),
    "list of texts": (["abcdefgh", "abcdefghijklmnop"], 2 + 4 + 4 + 4),
    "list of token ids": ([[1, 2], [3, 4, 5]], 2 + 4 + 3 + 4),
}


@pytest.mark.parametrize("name", PROMPTS)
async def test_every_prompt_of_a_list_is_priced(small: Stack, name: str) -> None:
    """FC-43."""
    prompt, tokens = PROMPTS[name]
    sequences = 2 if name.startswith("list") else 1
    body = {"prompt": prompt, "max_tokens": 4}
    answer = await small.fetch(request(COMPLETIONS, body))
    assert answer.status == 200
    assert answer.header("x-kvgate-reserved-blocks") == str(tokens - sequences)
    await small.until(reserved_blocks=0)


async def test_every_choice_is_priced(small: Stack) -> None:
    """FC-43: 4 x (10 + 8 - 1)."""
    answer = await small.fetch(request(body=payload(False, n=4, max_tokens=8), script={"prompt_tokens": 10}))
    assert answer.header("x-kvgate-reserved-blocks") == "68"


@pytest.mark.parametrize(
    ("code", "prompt", "fields", "fits"),
    [
        ("context_length_exceeded", 150, {}, None),
        ("context_length_exceeded", 5000, {"max_tokens": 1}, None),
        ("kv_capacity_exceeded", 100, {"n": 2, "max_tokens": 40}, None),
        ("kv_capacity_exceeded", 50, {"n": 2, "max_tokens": ...}, 41),
        ("kv_capacity_exceeded", 86, {"n": 2, "max_tokens": 6}, 5),
    ],
)
async def test_what_can_never_succeed_is_not_told_to_come_back(
    small: Stack, code: str, prompt: int, fields: dict[str, Any], fits: int | None
) -> None:
    """FC-05: and the next small request is admitted at once."""
    for stream in (True, False):
        data = request(body=payload(stream, **fields), script={"prompt_tokens": prompt})
        answer = await small.fetch(data)
        assert (answer.status, answer.code) == (413, code)
        assert answer.header("x-should-retry") == "false"
        assert answer.header("x-kvgate-reason") == code
        assert answer.header("retry-after") is None
        assert answer.header("retry-after-ms") is None
        assert answer.json["error"]["output_cap_that_fits"] == fits
        assert (await small.fetch(request(body=payload(False)))).status == 200


async def test_a_refusal_names_the_cap_that_would_be_admitted(small: Stack) -> None:
    holder = await Client.connect(small.port)
    holder.send(request(body=payload(max_tokens=91), script=HELD | {"prompt_tokens": 10}))
    await holder.events(1)
    ask = {"prompt_tokens": 20}
    answer = await small.fetch(request(body=payload(False, max_tokens=...), script=ask))
    error = answer.json["error"]
    assert (answer.status, answer.code) == (429, "kv_capacity")
    assert (error["needed_tokens"], error["free_tokens"], error["usable_tokens"]) == (149, 80, 180)
    assert (error["output_cap"], error["output_cap_that_fits"]) == (130, 61)
    assert "61" in error["message"]
    more = await small.fetch(request(body=payload(False, max_tokens=62), script=ask))
    fits = await small.fetch(request(body=payload(False, max_tokens=61), script=ask))
    assert (more.status, fits.status) == (429, 200)
    holder.cut()
    await small.assert_idle()


async def test_no_path_reaches_the_engine_without_a_price(small: Stack) -> None:
    await asyncio.to_thread(small.engine.stats, reset=True)
    paths = [
        "/invocations",
        "/v1/audio/transcriptions",
        "/generate",
        "/v1/chat/completions/",
        "//v1/chat/completions",
    ]
    paths += ["/V1/chat/completions", "/v1/embeddings/", "/v1/embeddings/../chat/completions"]
    for path in paths:
        answer = await small.fetch(request(path, payload(False)))
        assert (path, answer.status, answer.code) == (path, 403, "unpriced_endpoint")
        assert answer.header("x-should-retry") == "false"
    for method in ("PUT", "PATCH", "DELETE"):
        answer = await small.fetch(request(CHAT, payload(False), method=method))
        assert (method, answer.status, answer.code) == (method, 403, "unpriced_endpoint")
    assert (await asyncio.to_thread(small.engine.stats))["requests"] == 0


async def test_a_query_changes_nothing_about_the_price(small: Stack) -> None:
    answer = await small.fetch(request(CHAT + "?user=1", payload(False)))
    assert answer.status == 200
    assert answer.header("x-kvgate-reserved-blocks") == "16"


async def test_an_allowed_path_is_passed_on_as_it_is(small: Stack) -> None:
    answer = await small.fetch(request("/v1/embeddings", b'{"input": [1,  2]}'))
    assert (answer.status, answer.body) == (200, b'{"input": [1,  2]}')
    assert answer.header("x-kvgate-reserved-blocks") is None


async def test_get_is_passed_through_and_costs_nothing(small: Stack) -> None:
    before = (await asyncio.to_thread(small.status))["counters"]
    answer = await small.fetch(request("/v1/models?x=1", method="GET"))
    after = (await asyncio.to_thread(small.status))["counters"]
    assert (answer.status, answer.json["data"][0]["id"]) == (200, "scripted")
    assert after["admissions"] == before["admissions"]


async def test_the_counters_add_up(small: Stack) -> None:
    status = await asyncio.to_thread(small.status)
    counters = status["counters"]
    assert counters["admissions"] == sum(Counter(counters["releases"]).values())
    assert counters["refusals"]["kv_capacity"] >= 490
    assert counters["double_releases"] == 0
