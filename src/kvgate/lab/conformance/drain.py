"""Shutdown: the last case, for the gateway is gone afterwards."""

from __future__ import annotations

import asyncio
import os
import signal

from kvgate.lab.conformance.case import NotApplicable, Section, expect
from kvgate.lab.conformance.refusals import moment
from kvgate.lab.conformance.setting import Setting

section = Section("Shutdown", 10)


@section.case(
    "FC-50",
    "a gateway that is told to stop finishes its streams and takes nothing new",
    reference="BerriAI/litellm#29439",
    expected="503 with Retry-After (or no connection) for new requests; the running stream comes whole",
)
async def drain(s: Setting) -> None:
    if s.gateway_pid is None:
        raise NotApplicable("give --gateway-pid to run it; it stops the gateway")
    running, fresh = await s.plan(chunks=50, interval_ms=20), await s.plan()
    # A connection made before, for a gateway that stops to listen.
    late = await s.connect()
    client = await s.started(running)
    os.kill(s.gateway_pid, signal.SIGTERM)
    await asyncio.sleep(0.1)
    try:
        late.send(s.post(s.body(fresh)))
        answer = await late.answer()
        expect(answer.status == 503, f"a new request got {answer}")
        moment(answer)
    except ConnectionError:
        pass  # closed: the client knows that it was not taken
    expect(not await s.engine.log(fresh), "a new request reached the engine")
    whole = await client.answer()
    expect(whole.complete and whole.events[-1:] == [b"[DONE]"], f"the running stream ended as {whole}")
