"""Coming back: clients that obey get in. First in the run, for a gate remembers whom it sent away."""

from __future__ import annotations

import asyncio

from kvgate.lab.conformance.case import Section, expect
from kvgate.lab.conformance.raw_client import Answer
from kvgate.lab.conformance.refusals import BUSY, hold, moment
from kvgate.lab.conformance.setting import Setting

section = Section("Coming back", 0, ends_idle=True)


async def warm(s: Setting) -> None:
    """Six answers of 1 s, so that a gateway that forecasts has something to forecast from."""
    markers = [await s.plan(chunks=50, interval_ms=20) for _ in range(6)]
    each = s.pool.usable // 6
    await asyncio.gather(*(s.fetch(s.post(s.sized(m, each))) for m in markers))


@section.case(
    "come-back",
    "who comes back at the stated moment gets in",
    reference="llm-d/llm-d-router#2489",
    expected="200 at the third coming at the latest, each at the moment stated, or after a wait",
    seconds=40,
)
async def come_back(s: Setting) -> None:
    await warm(s)
    holder, _ = await hold(s, chunks=50)  # 1 s
    answers = []
    for _ in range(4):
        marker = await s.plan()
        answer = await s.fetch(s.post(s.sized(marker, 512)))
        if answer.status == 200:
            expect(await s.engine.ended(holder, 0.0), "it got in while all was still held")
            return
        expect(answer.status in BUSY, f"got {answer}")
        wait = moment(answer)
        answers.append(wait)
        expect(sum(answers) <= 30, f"told to wait {wait:g} s for an answer of 1 s (before: {answers[:-1]})")
        await asyncio.sleep(wait)
    expect(False, f"refused at each of 3 comings, after {answers} s")


@section.case(
    "FC-02",
    "a large cap that ends early gives its room back at once",
    reference="NVIDIA/TensorRT-LLM#2866",
    expected="the small ones are told when to come back, and get in when they do",
    seconds=30,
)
async def early_end(s: Setting) -> None:
    await warm(s)
    await hold(s, chunks=20)  # 0.4 s of its long cap

    async def small() -> Answer:
        answer = Answer()
        for _ in range(3):
            marker = await s.plan(chunks=2)
            answer = await s.fetch(s.post(s.sized(marker, 100)))
            if answer.status not in BUSY:
                break
            await asyncio.sleep(moment(answer))
        return answer

    answers = await asyncio.gather(*(small() for _ in range(5)))
    late = [answer for answer in answers if answer.status != 200]
    expect(not late, f"{len(late)} of 5 did not get in at their second coming: {late[:1]}")


@section.case(
    "FC-07",
    "a storm of short prompts with large caps kills no stream",
    reference="unslothai/unsloth#10301",
    expected="8 streams, 2.2 times the cache: none dies, the cache never overflows, all come whole",
    seconds=40,
)
async def storm(s: Setting) -> None:
    prompt, cap = 71, s.pool.total // 4
    died: list[Answer] = []
    refusals = finished = 0

    async def one() -> None:
        nonlocal refusals, finished
        waited = 0.0
        while waited < 30:
            marker = await s.plan(prompt_tokens=prompt, chunks=cap, interval_ms=1, obey_cap=True)
            answer = await s.fetch(s.post(s.body(marker, max_tokens=cap)), 20.0)
            if answer.status in BUSY:
                refusals += 1
                wait = moment(answer)
                waited += wait
                await asyncio.sleep(wait)
                continue
            if answer.events[-1:] == [b"[DONE]"]:
                finished += 1
            else:
                died.append(answer)
            return

    await s.engine.cache(s.pool.total)
    try:
        await asyncio.gather(*(one() for _ in range(8)))
        overflows = (await s.engine.stats())["cache"]["overflows"]
    finally:
        await s.engine.cache(0)
    expect(
        not died and not overflows, f"{len(died)} of 8 streams died, the cache overflowed {overflows} times"
    )
    expect(finished == 8, f"{8 - finished} of 8 never got in, after {refusals} refusals")


@section.case(
    "FC-45",
    "a large request is not starved by small ones",
    reference="vllm-project/vllm#33499",
    expected="three quarters of the pool within 8 s, coming back as told, under 120 % load of small ones",
    seconds=20,
)
async def no_starvation(s: Setting) -> None:
    size = 500
    fit = s.pool.usable // size
    over = False

    async def small() -> None:
        while not over:
            marker = await s.plan(chunks=5, interval_ms=40)
            answer = await s.fetch(s.post(s.sized(marker, size)), 10.0)
            if answer.status in BUSY:
                await asyncio.sleep(moment(answer))

    async def large() -> Answer:
        loop = asyncio.get_running_loop()
        end = loop.time() + 8.0
        while True:
            marker = await s.plan(chunks=2)
            answer = await s.fetch(s.post(s.sized(marker, s.pool.usable * 3 // 4)), 10.0)
            if answer.status not in BUSY:
                return answer
            wait = moment(answer)
            expect(loop.time() + wait < end, f"the large one was still refused after 8 s: {answer}")
            await asyncio.sleep(wait)

    crowd = [asyncio.create_task(small()) for _ in range(fit * 6 // 5 + 1)]
    try:
        await asyncio.sleep(0.5)
        answer = await large()
        expect(answer.status == 200, f"the large one got {answer}")
    finally:
        over = True
        for task in crowd:
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
