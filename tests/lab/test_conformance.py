"""The suite passes on kvgate, and finds what is wrong with gateways that are wrong on purpose."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bad_gateways import bad_gateway
from click.testing import CliRunner

from kvgate.cli.conformance import conformance
from kvgate.lab.conformance import (
    CASES,
    Case,
    EngineControl,
    NoEngine,
    Pool,
    Result,
    Setting,
    Verdict,
    all_cases,
    run,
    select,
)
from kvgate.lab.conformance.report import as_json, compare, listing

sys.path.append(str(Path(__file__).parents[1] / "edge"))
from harness import Engine, Stack

GRACE = 0.2
ROOT = Path(__file__).parents[2]
# Those that need a gateway with a queue run before one that has it.
QUEUED = ("FC-18", "FC-45")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    started = Engine()
    yield started
    started.kill()


def failures(results: list[Result]) -> dict[str, str]:
    return {result.case.name: result.seen for result in results if result.verdict is Verdict.FAIL}


async def on_kvgate(cases: list[Case], *options: str) -> list[Result]:
    stack = Stack(*options, "--engine-idle-timeout", "20", total_blocks=4096, context=2048)
    try:
        pool = Pool(abort_grace=GRACE)
        control = EngineControl(f"127.0.0.1:{stack.engine.port}")
        pid = stack.gateway.pid
        return await run(Setting(f"http://127.0.0.1:{stack.port}", control, pool, gateway_pid=pid), cases)
    finally:
        stack.stop()


async def test_kvgate_passes_every_case() -> None:
    results = await on_kvgate([case for case in all_cases() if case.name not in QUEUED])
    assert failures(results) == {}
    skipped = [result.case.name for result in results if result.verdict is Verdict.NOT_APPLICABLE]
    assert skipped == []


async def test_kvgate_with_a_queue_passes_what_needs_one() -> None:
    results = await on_kvgate([CASES[name] for name in QUEUED], "--max-wait", "6")
    assert {r.case.name: (r.verdict, r.seen) for r in results} == dict.fromkeys(QUEUED, (Verdict.PASS, ""))


FINDS = {
    "buffers": ("FC-48", "first-event-at-once", "head-at-once"),
    "keeps": ("FC-20", "cancel-before-head"),
    "hides cuts": ("FC-15-mid-event", "FC-15-after-head"),
    "merges": ("smuggle-length-and-chunked", "smuggle-chunked-and-length", "smuggle-two-lengths"),
    None: ("FC-05", "FC-33", "FC-38", "FC-43", "cap-written", "broken-stream-error-event", "FC-32"),
}


@pytest.mark.parametrize("flaw", FINDS)
async def test_a_gateway_that_is_wrong_on_purpose_is_found(engine: Engine, flaw: str | None) -> None:
    control = EngineControl(f"127.0.0.1:{engine.port}")
    async with bad_gateway(engine.port, flaw) as url:
        setting = Setting(url, control, Pool(abort_grace=0.0))
        results = await run(setting, [CASES[name] for name in FINDS[flaw]])
    assert [result.case.name for result in results if result.verdict is not Verdict.FAIL] == []


async def test_the_same_proxy_without_its_flaw_passes_those_cases(engine: Engine) -> None:
    control = EngineControl(f"127.0.0.1:{engine.port}")
    names = [*FINDS["buffers"], *FINDS["keeps"], "FC-15-mid-event"]
    async with bad_gateway(engine.port, None) as url:
        setting = Setting(url, control, Pool(abort_grace=0.0))
        assert failures(await run(setting, [CASES[name] for name in names])) == {}


async def test_a_case_that_cannot_be_run_says_why(engine: Engine) -> None:
    control = EngineControl(f"127.0.0.1:{engine.port}")
    async with bad_gateway(engine.port, None) as url:
        (result,) = await run(Setting(url, control, Pool()), [CASES["FC-50"]])
    assert (result.verdict, "--gateway-pid" in result.seen) == (Verdict.NOT_APPLICABLE, True)


async def test_without_a_scripted_engine_nothing_is_judged(engine: Engine) -> None:
    async with bad_gateway(engine.port, None) as url:
        setting = Setting(url, EngineControl("127.0.0.1:1"), Pool())
        with pytest.raises(NoEngine, match="scripted_engine"):
            await run(setting, [CASES["FC-14"]])


def test_there_are_cases_of_every_section_and_each_says_what_it_wants() -> None:
    assert len(CASES) >= 40
    for case in all_cases():
        assert case.title, case.name
        assert case.expected, case.name
        assert case.reference, case.name


def test_cases_are_selected_by_name_and_by_section() -> None:
    assert [case.name for case in select("FC-14")] == ["FC-14"]
    assert {case.section for case in select("smuggling")} == {"Smuggling"}
    assert len(select("FC-15*")) > 3
    assert select("no such case") == []
    assert [case.name for case in select(None)][-1] == "FC-50"


def test_the_command_shows_its_cases_and_what_is_missing() -> None:
    shown = CliRunner().invoke(conformance, ["--list"])
    assert shown.exit_code == 0
    assert all(name in shown.output for name in CASES)
    assert CliRunner().invoke(conformance, []).exit_code == 2
    unknown = CliRunner().invoke(conformance, ["--only", "nonsense"])
    assert (unknown.exit_code, "--list" in unknown.output) == (2, True)
    nobody = CliRunner().invoke(conformance, ["http://127.0.0.1:1", "--engine", "127.0.0.1:1"])
    assert (nobody.exit_code, "no scripted engine" in nobody.output) == (2, True)
    https = CliRunner().invoke(conformance, ["https://127.0.0.1:1", "--engine", "127.0.0.1:1"])
    assert (https.exit_code, "is not an address" in https.output) == (2, True)


def test_the_command_ends_with_1_where_a_case_failed(engine: Engine, tmp_path: Path) -> None:
    """The engine itself is a gateway that does nothing."""
    address = f"127.0.0.1:{engine.port}"
    file = tmp_path / "results.json"
    arguments = [f"http://{address}", "--engine", address, "--json", str(file), "--label", "nothing"]
    failed = CliRunner().invoke(conformance, [*arguments, "--only", "x-accel-buffering"])
    assert failed.exit_code == 1, failed.output
    page = json.loads(file.read_text())
    assert (page["label"], page["counts"]) == ("nothing", {"pass": 0, "fail": 1, "n/a": 0})
    passed = CliRunner().invoke(conformance, [*arguments, "--only", "comments"])
    assert passed.exit_code == 0, passed.output
    table = CliRunner().invoke(conformance, ["--compare", str(file), "--compare", str(file)])
    assert table.exit_code == 0
    assert "| pass | pass |" in table.output
    file.write_text("{}")
    broken = CliRunner().invoke(conformance, ["--compare", str(file)])
    assert (broken.exit_code, "--json" in broken.output) == (2, True)


def test_runs_side_by_side_show_what_one_of_them_lacks() -> None:
    def report(label: str, *outcomes: tuple[str, Verdict]) -> dict[str, object]:
        results = [Result(CASES[name], verdict, "", 0.1) for name, verdict in outcomes]
        return as_json(label, "http://x", "1", results, 1.0)

    table = compare(
        [
            report("one", ("FC-14", Verdict.PASS), ("FC-48", Verdict.FAIL)),
            report("two", ("FC-14", Verdict.NOT_APPLICABLE)),
        ]
    )
    (first,) = [line for line in table.splitlines() if "`FC-14`" in line]
    (second,) = [line for line in table.splitlines() if "`FC-48`" in line]
    assert first.endswith("| pass | n/a |")
    assert second.endswith("| **fail** | absent |")


def test_the_document_lists_the_cases_that_there_are() -> None:
    assert listing().strip() in (ROOT / "docs" / "conformance.md").read_text("utf-8")
