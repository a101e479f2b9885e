"""Life-cycle: whoever goes away, and whenever, nothing stays taken at the engine or in the gate."""

from __future__ import annotations

import asyncio
import random

from kvgate.lab.conformance.case import NotApplicable, Section, expect
from kvgate.lab.conformance.setting import Setting

section = Section("Life-cycle", 1, ends_idle=True)
LONG = {"chunks": 400, "interval_ms": 20}  # 8 s, longer than any case waits
CANCELS = 20


@section.case(
    "FC-14",
    f"a client that leaves in mid-stream, {CANCELS} times, frees the engine each time",
    reference="BerriAI/litellm#27955",
    expected="the engine's request is closed within 1 s of each cut",
)
async def cancel_in_mid_stream(s: Setting) -> None:
    for turn in range(CANCELS):
        marker = await s.plan(**LONG)
        client = await s.started(marker, events=3)
        client.cut()
        await s.released(marker, f"cut {turn + 1}: the client left after 3 events")


@section.case(
    "FC-20",
    "a client that leaves a request without a stream frees the engine",
    reference="ROCm/ATOM#1562",
    expected="the engine's request is closed within 1 s",
)
async def cancel_without_stream(s: Setting) -> None:
    marker = await s.plan(**LONG)
    client = await s.send(s.post(s.body(marker, stream=False)))
    await s.reached(marker)
    client.cut()
    await s.released(marker, "the client left")


@section.case(
    "cancel-before-head",
    "a client that leaves during a silent prefill frees the engine",
    reference="vllm-project/vllm#10087",
    expected="the engine's request is closed within 1 s, though the engine has said nothing yet",
)
async def cancel_before_head(s: Setting) -> None:
    marker = await s.plan(fault="hang_before_headers")
    client = await s.send(s.post(s.body(marker)))
    await s.reached(marker)
    client.cut()
    await s.released(marker, "the client left before the first byte")


@section.case(
    "cancel-at-once",
    "clients that leave before, while and after their request reaches the engine leave nothing there",
    reference="BerriAI/litellm#30020",
    expected="no request is open at the engine 1.5 s later",
)
async def cancel_at_once(s: Setting) -> None:
    markers = [await s.plan(**LONG) for _ in range(20)]
    for turn, marker in enumerate(markers):
        client = await s.send(s.post(s.body(marker)))
        await asyncio.sleep(turn / 2000)
        client.cut()
    for turn, marker in enumerate(markers):
        await s.released(marker, f"the client left {turn / 2:g} ms after asking")


@section.case(
    "FC-18",
    "a client that leaves the queue is not served later",
    reference="ray-project/ray#60118",
    expected="its request never reaches the engine, and the next in line does",
)
async def cancel_while_waiting(s: Setting) -> None:
    holder = await s.plan(**LONG)
    held = await s.started(holder, **s.size(s.pool.usable))
    dead, alive = await s.plan(), await s.plan()
    leaver = await s.send(s.post(s.sized(dead, 512)))
    stayer = await s.send(s.post(s.sized(alive, 512)))
    if await s.engine.arrived(dead, 0.3) is not None:
        raise NotApplicable("no admission: the request went to the engine at once")
    if leaver.answers:
        raise NotApplicable(f"it does not queue: the request got {leaver.answers[0].status} at once")
    leaver.cut()
    await asyncio.sleep(0.05)
    held.cut()
    answer = await stayer.answer()
    expect(answer.status == 200, f"the one behind it got {answer}")
    expect(not await s.engine.log(dead), "the engine was given the request of a client that had left")


@section.case(
    "cancel-during-upload",
    "a client that leaves half-way through its body leaves nothing behind",
    reference="BerriAI/litellm#1477",
    expected="no generation is started, and nothing stays open at the engine",
)
async def cancel_during_upload(s: Setting) -> None:
    for turn in range(10):
        marker = await s.plan()
        whole = s.post(s.body(marker, padding="x" * 5000))
        client = await s.send(whole[: len(whole) - 100 * (turn + 1)])
        await asyncio.sleep(0.005 * (turn % 3))
        client.cut()
        seen = await s.engine.arrived(marker, 0.02)
        expect(seen is None, "a body that had not come whole was given to the engine as a request")


@section.case(
    "FC-19",
    "after a mixture of whole answers, cuts and engine faults nothing is left",
    reference="Avarok-Cybersecurity/atlas#368",
    expected="the engine's open requests are 0 and the whole pool can be had",
    seconds=20,
)
async def chaos(s: Setting) -> None:
    draw = random.Random(368)
    faults = (None, None, "close_before_headers", "close_mid", "reset_mid_chunk", "500", "hang_mid")

    async def one() -> None:
        marker = await s.plan(chunks=10, interval_ms=10, fault=draw.choice(faults), fault_after=3)
        client = await s.send(s.post(s.body(marker, stream=draw.random() < 0.7)))
        patience = draw.choice((0.01, 0.05, 0.1, 1.0))
        await client.until(lambda: client.answers, patience)
        client.cut()

    for _ in range(5):
        await asyncio.gather(*(one() for _ in range(20)))


@section.case(
    "FC-23",
    "two live requests with one X-Request-Id are two requests",
    reference="vllm-project/vllm#10583",
    expected="one is cut, the other comes whole",
)
async def one_id_twice(s: Setting) -> None:
    first, second = await s.plan(**LONG), await s.plan(chunks=10, interval_ms=30)
    lines = "X-Request-Id: the-same\r\n"
    doomed = await s.send(s.post(s.body(first), lines=lines))
    lucky = await s.send(s.post(s.body(second), lines=lines))
    await s.reached(first)
    await s.reached(second)
    doomed.cut()
    answer = await lucky.answer()
    expect(answer.status == 200 and answer.complete, f"the other request ended as {answer}")
    expect(answer.events[-1] == b"[DONE]", "the other stream did not come to its end")
    await s.released(first, "the client left")
    # And at once again, right after an abort.
    again = await s.plan()
    reused = await s.fetch(s.post(s.body(again), lines=lines))
    expect(reused.status == 200, f"the id used again after an abort got {reused}")


@section.case(
    "FC-26",
    "room that a client leaves is not given away while the engine may still work",
    reference="vllm-project/vllm#54947",
    expected="a request that needs that room does not reach the engine within 0.1 s of the disconnect",
)
async def grace_after_cancel(s: Setting) -> None:
    first, second = await s.plan(**LONG | {"chunks": 100}, fault="ignore_disconnect"), await s.plan()
    client = await s.started(first, **s.size(s.pool.usable))
    client.cut()
    await s.released(first, "the client left")
    await s.send(s.post(s.sized(second, 512)))
    seen = await s.engine.arrived(second, 0.15)
    (gone,) = await s.engine.log(first)
    if seen is not None:
        gap = seen["arrived"] - gone["ended"]
        expect(gap > 0.1, f"the engine got the next request {1000 * gap:.0f} ms after the disconnect")


@section.case(
    "FC-27",
    "a client that half-closes during a silent prefill does not hold its place for ever",
    reference="Neroued/ninfer#111",
    expected="it is answered whole, or its request is closed at the engine",
)
async def half_closed(s: Setting) -> None:
    marker = await s.plan(first_delay_ms=1000)
    client = await s.send(s.post(s.body(marker)))
    await s.reached(marker)
    client.transport.write_eof()
    expect(await s.engine.ended(marker, 4.0), "the engine's request was still open after 4 s")
    (seen,) = await s.engine.log(marker)
    if seen["how"] == "whole":
        whole = await client.until(lambda: client.answers and client.answers[0].complete, 2.0)
        expect(whole, "the engine answered whole, and the client did not get it")
