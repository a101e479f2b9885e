"""A burst at a pool that holds two requests: the gate keeps it busy, and the real study counts truly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from random import Random

import pytest

from kvgate.lab.real_study import RULES, Burst, Figures, Rule
from kvgate.lab.retry_study import ours
from kvgate.lab.retry_traffic import Wish
from kvgate.lab.retry_world import World
from kvgate.lab.storm_plan import Client, Planned

SEEDS = range(4)


def burst(rng: Random, count: int, seconds: float, life: float, cap: int = 400) -> list[Wish]:
    return [Wish(at, 20, cap, life) for at in sorted(rng.random() * seconds for _ in range(count))]


def world(max_wait: float, wishes: list[Wish], blocks: int, seed: int) -> World:
    made = World(ours(max_wait), blocks, seed)
    made.run(wishes)
    return made


@pytest.mark.parametrize("seed", SEEDS)
def test_a_burst_on_a_small_pool_is_served_soon_although_caps_are_far_above_the_answers(seed: int) -> None:
    """96 clients in 3 s, room for two at once, half a second each: 22.7 s of work for a full pool. The cap
    of 400 tokens made every early client stay away for 8 s or more, and the later ones behind them."""
    wishes = burst(Random(seed), 96, 3.0, 0.5)
    made = world(0.0, wishes, 57, seed)
    assert made.figures.served >= 60
    assert made.now <= 60.0
    waits = made.figures.waits
    assert sum(wait < 25.0 for wait in waits) >= 0.75 * len(waits)


@pytest.mark.parametrize("seed", SEEDS)
def test_those_told_on_a_wrong_guess_do_not_come_back_as_a_herd(seed: int) -> None:
    """The engine serves four a second; at most a handful come in any tenth of one."""
    made = world(0.0, burst(Random(seed), 96, 0.2, 0.5), 57, seed)
    assert made.figures.peak <= 6
    assert made.figures.served >= 48


@pytest.mark.parametrize("seed", SEEDS)
def test_a_burst_that_may_wait_is_nearly_all_served(seed: int) -> None:
    made = world(5.0, burst(Random(seed), 96, 3.0, 0.5), 57, seed)
    assert made.figures.served >= 84


class Refusing:
    """Refuses each request `refusals` times, naming `moment`; then answers with two tokens."""

    def __init__(self, refusals: int, moment: float) -> None:
        self.refusals, self.moment = refusals, moment
        self.asked: dict[str, list[str | None]] = {}

    async def serve(self, use: Callable[[str], Awaitable[None]]) -> None:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        async with server:
            await use(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/chat/completions")

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        await reader.readexactly(int(fields["Content-Length"]))
        asked = self.asked.setdefault(fields["Idempotency-Key"], [])
        asked.append(fields.get("x-stainless-retry-count"))
        if len(asked) <= self.refusals:
            moment = round(self.moment * 1000)
            writer.write(
                f"HTTP/1.1 429 Busy\r\nretry-after-ms: {moment}\r\nContent-Length: 0\r\n\r\n".encode()
            )
        else:
            choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": "length"}
            event = {"choices": [choice], "usage": {"completion_tokens": 2}}
            body = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()


def run(rule: Rule, server: Refusing, limit: float = 30.0) -> Figures:
    planned = [Planned(n, 0.0, 5, 10, Client.SDK, 0) for n in range(3)]
    found: list[Figures] = []

    async def use(url: str) -> None:
        found.append(await Burst(rule, url, 1).run(planned, limit, lambda: 0.5))

    asyncio.run(server.serve(use))
    return found[0]


AS_TOLD = next(rule for rule in RULES if rule.name == "kvgate, no line")


def test_clients_come_back_when_told_and_three_times_in_all() -> None:
    figures = run(AS_TOLD, Refusing(2, 0.01))
    assert (figures.finished, figures.refused, figures.attempts) == (3, 0, 9)
    assert (figures.tokens, len(figures.retries), len(figures.waits)) == (6, 6, 3)
    assert all(wait >= 0.02 for wait in figures.waits)
    server = Refusing(3, 0.01)
    figures = run(AS_TOLD, server)
    assert (figures.finished, figures.refused, figures.attempts) == (0, 3, 9)
    assert list(server.asked.values()) == [[None, "1", "2"]] * 3


def test_who_does_not_come_back_is_refused_at_once() -> None:
    figures = run(RULES[0], Refusing(1, 0.01))
    assert (figures.finished, figures.refused, figures.attempts) == (0, 3, 3)


def test_it_is_over_at_its_limit_and_tells_who_was_left() -> None:
    figures = run(AS_TOLD, Refusing(1, 60.0), limit=0.2)
    assert (figures.left, figures.finished) == (3, 0)
    assert figures.full_until(30.0) == 0.5


def test_every_rule_of_the_comparison_is_there() -> None:
    assert [rule.name for rule in RULES] == [
        "instant refusal", "libraries' own backoff", "constant 1 s", "constant 20 s",
        "kvgate, no line", "kvgate, wait up to 5 s",
    ]  # fmt: skip
