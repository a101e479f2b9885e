"""Refusals: the right status, headers and body, before the engine has seen anything."""

from __future__ import annotations

import asyncio
import json
import math
from functools import partial
from typing import Any

from kvgate.lab.conformance.case import Section, expect
from kvgate.lab.conformance.raw_client import Answer, Client
from kvgate.lab.conformance.setting import CHAT, COMPLETIONS, Setting

section = Section("Refusals", 9, ends_idle=True)
HOLD = {"chunks": 400, "interval_ms": 20}
BUSY = (429, 503, 529)
STORM = 200


async def hold(s: Setting, **script: Any) -> tuple[str, Client]:
    """A stream that holds all that is usable."""
    marker = await s.plan(**HOLD | script)
    return marker, await s.started(marker, **s.size(s.pool.usable))


async def refused(s: Setting, body: bytes, marker: str, path: str = CHAT) -> Answer:
    """The refusal of a request that does not fit now; the engine must not have seen it."""
    answer = await s.fetch(s.post(body, path))
    expect(answer.status in BUSY, f"in a full pool a request got {answer}")
    expect(not await s.engine.log(marker), "it was refused, and yet the engine got it")
    return answer


def moment(answer: Answer) -> float:
    """Seconds after which to come back. Fails where `Retry-After` is not a whole number from 1 to 60."""
    text = answer.header("retry-after")
    expect(text is not None and text.isdigit() and 1 <= int(text) <= 60, f"Retry-After is {text!r}")
    exact = answer.header("retry-after-ms")
    if exact is None:
        return float(text or 0)
    near = exact.isdigit() and abs(int(exact) / 1000 - int(text or 0)) <= 1
    expect(near, f"retry-after-ms {exact!r} is another moment than Retry-After {text!r}")
    return int(exact) / 1000


def for_good(answer: Answer, *, status: int = 413, code: str | None = None) -> None:
    """A refusal of what can never succeed: no client is told to come back."""
    expect(answer.status == status, f"instead of {status}: {answer}")
    again = answer.header("retry-after") or answer.header("retry-after-ms")
    expect(again is None, f"told to come back after {again}")
    told = answer.header("x-should-retry")
    expect(told == "false", f"x-should-retry is {told!r}, so SDKs may try again")
    if code is not None:
        expect(answer.error.get("code") == code, f"error.code is {answer.error.get('code')!r}")


@section.case(
    "FC-33",
    "what does not fit now is told to come back",
    reference="llm-d/llm-d-router#1751",
    expected="429 (or the configured 503, 529) in a full pool",
)
async def busy(s: Setting) -> None:
    await hold(s)
    marker = await s.plan()
    await refused(s, s.sized(marker, 512), marker)


@section.case(
    "FC-29",
    "the moment to come back is a whole number of seconds from 1 to 60",
    reference="openai/openai-node#1840",
    expected="Retry-After on each of 20 refusals, retry-after-ms within a second of it where present",
)
async def whole_seconds(s: Setting) -> None:
    await hold(s)
    markers = [await s.plan() for _ in range(20)]
    bodies = [s.sized(marker, 100 + 50 * turn) for turn, marker in enumerate(markers)]
    for answer in await asyncio.gather(*map(partial(refused, s), bodies, markers)):
        moment(answer)


@section.case(
    "FC-30",
    "every path that says busy says when to come back",
    reference="BerriAI/litellm#4695",
    expected="chat and completions, stream or not: Retry-After on each",
)
async def every_path(s: Setting) -> None:
    await hold(s)
    for stream in (True, False):
        marker = await s.plan()
        moment(await refused(s, s.sized(marker, 512, stream=stream), marker))
        marker = await s.plan()
        body = completion(s, marker, 512, stream=stream)
        moment(await refused(s, body, marker, COMPLETIONS))


def completion(s: Setting, marker: str, tokens: int, **fields: Any) -> bytes:
    """A completion body of 10 token ids that may come to hold this many tokens."""
    shown = {"model": s.model, "prompt": [1] * 10, "user": marker} | s.size(tokens) | fields
    return json.dumps(shown).encode()


@section.case(
    "FC-34",
    "the body of a refusal is in OpenAI's shape",
    reference="NVIDIA/nvcf#1690",
    expected="JSON with error.message, error.type, error.code (text) and error.param",
)
async def shape(s: Setting) -> None:
    await hold(s)
    marker = await s.plan()
    answer = await refused(s, s.sized(marker, 512), marker)
    kind = answer.header("content-type") or "absent"
    expect(kind.startswith("application/json"), f"content-type is {kind}")
    for name in ("message", "type", "code"):
        value = answer.error.get(name)
        expect(isinstance(value, str) and value != "", f"error.{name} is {value!r}")
    expect("param" in answer.error, "error.param is absent")


@section.case(
    "FC-35",
    "a stream is refused with a status, before any 200",
    reference="BerriAI/litellm#9035",
    expected="429 and a JSON body, not an event in a 200 stream",
)
async def status_before_stream(s: Setting) -> None:
    await hold(s)
    marker = await s.plan()
    answer = await refused(s, s.sized(marker, 512, stream=True), marker)
    expect(answer.complete and bool(answer.error), f"got {answer}")


@section.case(
    "refused-not-forwarded",
    "no part of a refused request reaches the engine as a generation",
    reference="waybarrios/vllm-mlx#795",
    expected="30 refusals, and the engine's generations have not grown",
)
async def not_forwarded(s: Setting) -> None:
    await hold(s)
    before = (await s.engine.stats())["generations"]
    markers = [await s.plan() for _ in range(30)]
    await asyncio.gather(*(refused(s, s.sized(marker, 512), marker) for marker in markers))
    after = (await s.engine.stats())["generations"]
    expect(after == before, f"{after - before} generations were started")


@section.case(
    "FC-37",
    "the gate opens again when the load is gone",
    reference="ai-dynamo/dynamo#10564",
    expected="after each of 3 bursts, 20 of 20 probes get 200",
    seconds=20,
)
async def opens_again(s: Setting) -> None:
    for turn in range(3):
        _, client = await hold(s)
        markers = [await s.plan() for _ in range(20)]
        await asyncio.gather(*(s.fetch(s.post(s.sized(m, 512))) for m in markers))
        client.cut()
        await s.end_check()
        for _ in range(20):
            marker = await s.plan()
            answer = await s.fetch(s.post(s.body(marker, stream=False)))
            expect(answer.status == 200, f"after burst {turn + 1} a probe got {answer}")


@section.case(
    "FC-38",
    "the limit that was configured is in force",
    reference="ai-dynamo/dynamo#7753",
    expected="a request of one block more than is usable is refused, one of all that is usable is not",
)
async def in_force(s: Setting) -> None:
    marker = await s.plan(chunks=1)
    answer = await s.fetch(s.post(s.whole_pool(marker)))
    expect(answer.status == 200, f"all that is usable: {answer}")
    await s.end_check()
    marker = await s.plan()
    block = s.pool.block_size
    choices = s.pool.usable // block + 1  # that many sequences of one block more than fit... each one block
    each = next(n for n in range(1, 129) if choices / n * block < s.pool.context)
    tokens = math.ceil(choices / each) * block * each
    answer = await s.fetch(s.post(s.sized(marker, tokens, n=each)))
    expect(answer.status in (413, *BUSY), f"more than is usable: {answer}")
    expect(not await s.engine.log(marker), "it was refused, and yet the engine got it")


@section.case(
    "FC-32",
    "clients refused at once are not sent back at once",
    reference="gastownhall/gascity#3279",
    expected=f"of {STORM} stated moments at most 5 % lie in any 100 ms",
    seconds=20,
)
async def spread(s: Setting) -> None:
    await hold(s)
    markers = [await s.plan() for _ in range(STORM)]
    answers = await asyncio.gather(*(s.fetch(s.post(s.sized(m, 512)), 10.0) for m in markers))
    moments = [moment(answer) for answer in answers if answer.status in BUSY]
    expect(len(moments) == STORM, f"{STORM - len(moments)} of {STORM} were not refused in a full pool")
    bins: dict[int, int] = {}
    for each in moments:
        bins[math.floor(each * 10)] = bins.get(math.floor(each * 10), 0) + 1
    most = max(bins.values())
    expect(most <= STORM * 0.05, f"{most} of {STORM} are told to come back within the same 100 ms")
