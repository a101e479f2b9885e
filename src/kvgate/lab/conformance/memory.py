"""Memory and counting: what the running streams may come to need never exceeds the KV cache."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from kvgate.lab.conformance.case import Section, expect
from kvgate.lab.conformance.refusals import BUSY, HOLD, for_good, hold, moment, refused
from kvgate.lab.conformance.setting import COMPLETIONS, PROMPT, Setting

section = Section("Memory and counting", 8, ends_idle=True)


@section.case(
    "FC-01",
    "an unset cap is priced as the rest of the context",
    reference="MiaAI-Lab/GLM-5.3-Flash-EXL3-2x-DGX-Sparks#51",
    expected="beside it nothing gets in that would fit only beside a small one; with a cap of 500 it does",
)
async def unset_cap(s: Setting) -> None:
    first, second = await s.plan(**HOLD), await s.plan()
    beside = s.pool.usable - s.pool.context + 200
    client = await s.started(first, max_tokens=...)
    await refused(s, s.sized(second, beside), second)
    client.cut()
    await s.end_check()
    first, second = await s.plan(**HOLD), await s.plan()
    await s.started(first, max_tokens=500)
    answer = await s.fetch(s.post(s.sized(second, beside)))
    expect(answer.status == 200, f"beside a cap of 500: {answer}")


@section.case(
    "FC-09",
    "400 simultaneous requests are each answered soon",
    reference="vllm-project/vllm#2901",
    expected="200 or a refusal with Retry-After within 8 s for every one",
    seconds=20,
)
async def all_at_once(s: Setting) -> None:
    markers = [await s.plan(chunks=2, interval_ms=20) for _ in range(400)]
    answers = await asyncio.gather(*(s.fetch(s.post(s.body(m)), 8.0) for m in markers))
    for answer in answers:
        if answer.status != 200:
            expect(answer.status in BUSY, f"got {answer}")
            moment(answer)


@section.case(
    "FC-40",
    "requests at the same instant do not overshoot the limit together",
    reference="BerriAI/litellm#18730",
    expected="of 60 at once no more run than fit",
)
async def overshoot(s: Setting) -> None:
    each = 500
    fit = s.pool.usable // (-(-each // s.pool.block_size) * s.pool.block_size)
    markers = [await s.plan(chunks=10, interval_ms=30) for _ in range(60)]
    await asyncio.gather(*(s.fetch(s.post(s.sized(m, each)), 8.0) for m in markers))
    records = [record for m in markers for record in await s.engine.log(m)]
    edges = sorted([(r["arrived"], 1) for r in records] + [(r["ended"], -1) for r in records])
    running = most = 0
    for _, step in edges:
        running += step
        most = max(most, running)
    expect(most <= fit, f"{most} ran at the same time where {fit} fit")


@section.case(
    "FC-43",
    "n, best_of and a list of prompts multiply the price",
    reference="the vendor's documentation of best_of",
    expected="413 where they ask for more than the pool, on chat and completions; the engine gets none",
)
async def multiplied(s: Setting) -> None:
    each = s.pool.context - s.pool.block_size
    many = s.pool.total // each + 2
    cap = each - PROMPT

    async def too_much(path: str, body: dict[str, Any], marker: str, what: str) -> None:
        data = json.dumps({"model": s.model, "max_tokens": cap, "user": marker} | body).encode()
        answer = await s.fetch(s.post(data, path))
        expect(not await s.engine.log(marker), f"{what}: the engine got it")
        expect(answer.status == 413, f"{what}: {answer}")
        for_good(answer)

    marker = await s.plan()
    messages = [{"role": "user", "content": f"hello {marker}"}]
    await too_much("/v1/chat/completions", {"messages": messages, "n": many}, marker, f"chat, n {many}")
    prompt = [1] * PROMPT
    bodies: dict[str, dict[str, Any]] = {
        f"completions, n {many}": {"prompt": prompt, "n": many},
        f"completions, best_of {many}": {"prompt": prompt, "n": 1, "best_of": many},
        f"completions, {many} prompts": {"prompt": [prompt] * many},
    }
    for what, body in bodies.items():
        marker = await s.plan()
        await too_much(COMPLETIONS, body, marker, what)


@section.case(
    "both-endpoints",
    "chat and completions share one pool",
    reference="api7/aisix#688",
    expected="a completion is refused while a chat holds the pool, and the other way round",
)
async def both_endpoints(s: Setting) -> None:
    _, client = await hold(s)
    marker = await s.plan()
    shown = {"model": s.model, "prompt": [1] * PROMPT, "max_tokens": 500, "user": marker}
    await refused(s, json.dumps(shown).encode(), marker, COMPLETIONS)
    client.cut()
    await s.end_check()
    marker = await s.plan(**HOLD)
    sizes = s.size(s.pool.usable)
    shown = {"model": s.model, "prompt": [1] * PROMPT, "stream": True, "user": marker} | sizes
    await s.send(s.post(json.dumps(shown).encode(), COMPLETIONS))
    await s.reached(marker)
    marker = await s.plan()
    await refused(s, s.sized(marker, 512), marker)
