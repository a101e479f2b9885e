"""The conformance suite on the middleware inside a real vLLM: what needs no faults of the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_middleware import BLOCKS, SERVER, block_size, metric, server

from kvgate.lab.conformance import EngineControl, Pool, Setting, Verdict, all_cases, run

pytestmark = pytest.mark.vllm

SECTIONS = ("Life-cycle", "Refusals", "Never and invalid")
CONTEXT = 4096
# Cases of these sections that a real engine cannot play, or that ask for what the gateway alone does.
OTHERWISE = {
    "cancel-before-head": "an engine that hangs before its head",
    "FC-19": "an engine that breaks, hangs and cuts",
    "FC-26": "an engine that ignores a disconnect",
    "FC-11": "counts are told by a script there, and are the tokenizer's here",
    "FC-18": "needs a queue, and the other cases need none",
    "FC-41": "another spelling of a path is priced and passed on, where the gateway refuses it",
}


class VllmSetting(Setting):
    """Prompts of 10 tokens by vLLM's own count; the marker stands beside them."""

    def body(self, marker: str, *, stream: bool = True, **fields: Any) -> bytes:
        # Seven bytes, one token each, and three special tokens of the template.
        own = {"messages": [{"role": "user", "content": "hello w"}], "user": marker}
        return super().body(marker, stream=stream, **own | fields)

    def size(self, tokens: int) -> dict[str, int]:
        # vLLM's blocks on the CPU are larger than the smallest requests of the suite.
        return super().size(max(tokens, self.pool.block_size))


async def test_the_middleware_inside_vllm_passes_what_needs_no_fault_of_the_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = ("--middleware", "witness.Witness", "--middleware", "kvgate.vllm.Middleware")
    with server(tmp_path, *both, module=SERVER, KVGATE_ALLOW_PATH="/script/plan") as url:
        pool = Pool(BLOCKS - 1, block_size(url), CONTEXT, abort_grace=1.0)
        control = EngineControl(url)
        setting = VllmSetting(url, control, pool, model="tiny")
        cases = [case for case in all_cases() if case.section in SECTIONS and case.name not in OTHERWISE]
        results = await run(setting, cases, limit=30)
        running = metric(url, "vllm:num_requests_running").rsplit(" ", 1)[1]
    failed = {result.case.name: result.seen for result in results if result.verdict is not Verdict.PASS}
    with capsys.disabled():
        print(f"{len(results) - len(failed)} of {len(results)} cases pass inside vLLM")
    assert failed == {}
    assert float(running) == 0


def test_every_case_that_is_left_out_exists_and_stands_in_the_document() -> None:
    text = (Path(__file__).parents[2] / "docs" / "asgi.md").read_text("utf-8")
    names = {case.name for case in all_cases()}
    for name in OTHERWISE:
        assert name in names
        assert f"`{name}`" in text
