"""The conformance suite on the middleware: the same cases as for the gateway, each server in turn.

Behind the middleware stands an application that passes everything on to the scripted engine. What is
the server's own (framing, heads, smuggling, draining) is not the middleware's and is left out by
section; what else does not apply is named below with the reason, and has to stay true: a case that
passes by now must leave the list.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TypeAlias

import pytest
from asgi_servers import SERVERS, Running

from kvgate.lab.conformance import EngineControl, Pool, Result, Setting, Verdict, all_cases, run

sys.path.append(str(Path(__file__).parent))
from harness import Engine

GRACE = 0.2
ROOT = Path(__file__).parents[2]
SETTINGS = {
    "TEST_BLOCKS": "4096",
    "TEST_CONTEXT": "2048",
    "TEST_FRACTION": "0.9",
    "TEST_GRACE": str(GRACE),
}
# Bytes on the wire: the server parses and writes them before and after the middleware sees a message.
SERVERS_OWN = {"Smuggling", "Framing", "Shutdown"}
# Cases whose verdict says nothing of the middleware, and why.
OTHERWISE = {
    "FC-18": "needs a queue; tests/edge/test_asgi.py has it on each server",
    "FC-45": "needs a queue",
    "FC-11": "the counts are the application's own function, which says 10 here",
    "FC-41": "another spelling of a path is priced and passed on, where the gateway refuses it",
    "broken-stream-error-event": "an answer is the application's; the middleware adds nothing to its end",
    "x-accel-buffering": "header fields of an answer are the application's",
    "head-method": "the proxying application of this test knows no HEAD",
    "interim-103": "the proxying application of this test knows no interim answers",
    "until-close": "the proxying application of this test needs a framed answer",
}


Results: TypeAlias = dict[str, list[Result]]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Results:
    """Of the servers that are asked for, each with an engine of its own: all at once, as most of a
    case is waiting."""
    asked = {
        item.callspec.params.get("server") for item in request.session.items if hasattr(item, "callspec")
    }
    cases = [case for case in all_cases() if case.section not in SERVERS_OWN and case.name not in OTHERWISE]
    assert len(cases) > 50

    async def one(server: str) -> list[Result]:
        engine = Engine()
        try:
            with Running(server, "proxy_app", TEST_ENGINE=str(engine.port), **SETTINGS) as running:
                control = EngineControl(f"127.0.0.1:{engine.port}")
                return await run(Setting(running.url, control, Pool(abort_grace=GRACE)), cases)
        finally:
            engine.kill()

    async def every() -> Results:
        servers = [server for server in SERVERS if server in asked]
        return dict(zip(servers, await asyncio.gather(*map(one, servers)), strict=True))

    return asyncio.run(every())


@pytest.mark.slow
@pytest.mark.parametrize("server", SERVERS)
def test_the_middleware_passes_what_is_its_own(server: str, results: Results) -> None:
    seen = {result.case.name: result.seen for result in results[server] if result.verdict is not Verdict.PASS}
    assert seen == {}


def test_every_case_that_is_left_out_exists_and_has_its_reason_in_the_document() -> None:
    text = (ROOT / "docs" / "asgi.md").read_text("utf-8")
    names = {case.name for case in all_cases()}
    for name in OTHERWISE:
        assert name in names
        assert f"`{name}`" in text
