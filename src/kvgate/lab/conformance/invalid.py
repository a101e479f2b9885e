"""Requests that can never succeed, or that nobody can price: refused for good, at once."""

from __future__ import annotations

import json
import time
from typing import Any

from kvgate.lab.conformance.case import Section, expect
from kvgate.lab.conformance.refusals import for_good
from kvgate.lab.conformance.setting import CHAT, COMPLETIONS, PROMPT, Setting

section = Section("Never and invalid", 7, ends_idle=True)


@section.case(
    "FC-05",
    "what can never fit the pool is refused for good, and blocks nobody",
    reference="vllm-project/vllm#39734",
    expected="413 at once, kv_capacity_exceeded, x-should-retry: false, no Retry-After; the next gets 200",
)
async def never_fits(s: Setting) -> None:
    marker, small = await s.plan(), await s.plan()
    each = s.pool.context - s.pool.block_size
    choices = s.pool.total // each + 2
    started = time.monotonic()
    body = s.body(marker, n=choices, max_tokens=each - PROMPT)
    answer = await s.fetch(s.post(body))
    for_good(answer, code="kv_capacity_exceeded")
    expect(time.monotonic() - started < 1.0, "it took a second and more")
    expect(not await s.engine.log(marker), "it was refused, and yet the engine got it")
    after = await s.fetch(s.post(s.body(small)))
    expect(after.status == 200, f"the next small request got {after}")


@section.case(
    "FC-11",
    "a prompt that fills the context is refused for good",
    reference="waybarrios/vllm-mlx#795",
    expected="413, context_length_exceeded, x-should-retry: false, no Retry-After; the engine gets nothing",
)
async def prompt_too_long(s: Setting) -> None:
    for prompt in (s.pool.context, s.pool.context + 1000):
        marker = await s.plan(prompt_tokens=prompt)
        messages = [{"role": "user", "content": f"{marker} " + "word " * prompt}]
        answer = await s.fetch(s.post(s.body(marker, messages=messages)))
        for_good(answer, code="context_length_exceeded")
        expect(not await s.engine.log(marker), "it was refused, and yet the engine got it")


@section.case(
    "FC-13",
    "a cap equal to the whole context has one fixed meaning",
    reference="gpustack/gpustack#929",
    expected="the engine gets a cap that fits behind the prompt, or the client gets a 4xx; twice the same",
)
async def cap_is_context(s: Setting) -> None:
    seen = []
    for _ in range(2):
        marker = await s.plan()
        answer = await s.fetch(s.post(s.body(marker, max_tokens=s.pool.context)))
        seen.append(answer.status)
        if answer.status == 200:
            cap = caps_of(await s.reached(marker))
            fits = len(cap) > 0 and max(cap) <= s.pool.context - PROMPT
            expect(fits, f"the engine got a cap of {cap} behind a prompt of {PROMPT}")
        else:
            expect(400 <= answer.status < 500, f"got {answer}")
    expect(seen[0] == seen[1], f"first {seen[0]}, then {seen[1]}")


def caps_of(record: dict[str, Any]) -> list[int]:
    """Every output cap in the body that the engine got, those of doubled keys too."""
    found: list[int] = []

    def look(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found.extend(value for name, value in pairs if name in ("max_tokens", "max_completion_tokens"))
        return dict(pairs)

    json.loads(record["body"], object_pairs_hook=look)
    return [cap for cap in found if isinstance(cap, int)]


@section.case(
    "cap-written",
    "the cap that was priced is the cap that the engine gets",
    reference="MiaAI-Lab/GLM-5.3-Flash-EXL3-2x-DGX-Sparks#51",
    expected="an unset cap reaches the engine as a number, at most the rest of the context",
)
async def cap_written(s: Setting) -> None:
    marker = await s.plan()
    answer = await s.fetch(s.post(s.body(marker, max_tokens=...)))
    expect(answer.status == 200, f"got {answer}")
    caps = caps_of(await s.reached(marker))
    expect(bool(caps), "the engine got no cap, so its own default holds")
    expect(max(caps) <= s.pool.context - PROMPT, f"the engine got a cap of {caps}")


@section.case(
    "doubled-keys",
    "a cap given twice in one body cannot be read two ways",
    reference="RFC 8259 section 4",
    expected="400, or a body with one cap only at the engine",
)
async def doubled_keys(s: Setting) -> None:
    marker = await s.plan()
    body = s.body(marker)[:-1] + b', "max_tokens": 1, "max_tokens": 2000}'
    answer = await s.fetch(s.post(body))
    if answer.status == 200:
        caps = caps_of(await s.reached(marker))
        expect(len(set(caps)) == 1, f"the engine got the caps {caps}")
    else:
        expect(answer.status == 400, f"got {answer}")


BAD_BODIES: dict[str, bytes] = {
    "broken JSON": b'{"messages": [',
    "no body": b"",
    "a list": b"[]",
    "text": b'"hello"',
    "a number": b"1",
    "not UTF-8": b'{"messages": "\xff\xfe"}',
    "NaN": b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": NaN}',
    "deeply nested": b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}
BAD_FIELDS: dict[str, Any] = {
    "max_tokens text": {"max_tokens": "5"},
    "max_tokens fraction": {"max_tokens": 1.5},
    "max_tokens true": {"max_tokens": True},
    "max_tokens negative": {"max_tokens": -5},
    "max_tokens list": {"max_tokens": [5]},
    "n 0": {"n": 0},
    "n negative": {"n": -1},
    "n text": {"n": "2"},
    "n 100000": {"n": 100_000},
    "stream text": {"stream": "yes"},
    "messages object": {"messages": {}},
    "messages empty": {"messages": []},
    "messages of numbers": {"messages": [1]},
    "messages absent": {"messages": ...},
    "role a number": {"messages": [{"role": 1, "content": "a"}]},
}


@section.case(
    "FC-16",
    "malformed bodies get a 4xx and hold nothing",
    reference="BerriAI/litellm#1477",
    expected=f"a 4xx for each of {len(BAD_BODIES)}, three times; no generation is started",
    seconds=15,
)
async def malformed(s: Setting) -> None:
    before = (await s.engine.stats())["generations"]
    for _ in range(3):
        for what, body in BAD_BODIES.items():
            answer = await s.fetch(s.post(body))
            expect(400 <= answer.status < 500, f"{what}: {answer}")
    after = (await s.engine.stats())["generations"]
    expect(after == before, f"{after - before} generations were started")


@section.case(
    "bad-types",
    "fields of a wrong type or range are refused before the engine sees them",
    reference="BerriAI/litellm#1477",
    expected=f"400 or 422 for each of {len(BAD_FIELDS)}, from the gateway",
)
async def bad_types(s: Setting) -> None:
    for what, fields in BAD_FIELDS.items():
        marker = await s.plan()
        answer = await s.fetch(s.post(s.body(marker, **{"user": marker} | fields)))
        expect(answer.status in (400, 413, 422), f"{what}: {answer}")
        expect(not await s.engine.log(marker), f"{what}: the engine got it")


@section.case(
    "FC-41",
    "no path that may generate goes past the gate",
    reference="api7/aisix#688",
    expected="403, 404, 405, or a 308; the engine gets none of them",
)
async def unpriced_paths(s: Setting) -> None:
    for path in (
        *("/generate", "/completion", "/infill", "/v1/complete", "/api/generate", "/v1/audio/speech"),
        *(CHAT + "/", "/" + CHAT, "/v1/chat/./completions", "/v1/%63hat/completions", "/v1/x/../completions"),
    ):
        marker = await s.plan()
        answer = await s.fetch(s.post(s.body(marker, stream=False), path))
        seen = await s.engine.log(marker, None)
        generations = [r for r in seen if r["kind"] == "generation" and r["path"] in (CHAT, COMPLETIONS)]
        if generations:
            continue  # made into a path that is priced, and priced as such
        expect(not seen, f"POST {path} was passed on to the engine without a price")
        expect(answer.status in (308, 400, 403, 404, 405), f"POST {path} got {answer}")
