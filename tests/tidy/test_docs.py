"""The documents say what the code does: names, figures, links and examples are looked up, not trusted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvgate.cli import main
from kvgate.config import Settings
from kvgate.core.gate import Gate
from kvgate.core.records import Ask, Ending, Granted, PoolFacts, Reason, Refused
from kvgate.edge.observing.loop_lag import LoopLag
from kvgate.edge.observing.telemetry import POOL_GAUGES, Telemetry
from kvgate.edge.relay.exchange import State
from kvgate.wire.engines.known import ENGINES
from kvgate.wire.refusal import STATUS, render

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
# Made by tools, or not text.
NOT_OURS = {".venv", ".venv-vllm", ".git", ".cache", "__pycache__", "build", "dist"}
# Flags of other programs, and of the modules that are run with `python -m`.
OTHER_FLAGS = {
    *("--help", "--strict", "--quick", "--port", "--repeats", "--only", "--minutes", "--model-size", "--mix"),
    *("--blocks", "--clients", "--model-config-kind"),
    *(
        "--api-key",
        "--override-generation-config",
        "--max-num-seqs",
        "--tensor-parallel-size",
        "--pipeline-parallel-size",
        "--kv-offloading-size",
        "--kv-transfer-config",
        "--no-enable-prefix-caching",
        "--max-num-batched-tokens",
        "--middleware",
        "--ctx-size",
        "--kv-unified",
        "--long-prefill-token-threshold",
    ),
}


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def our_files() -> list[Path]:
    return [
        path
        for path in ROOT.rglob("*")
        if path.is_file()
        and not any(
            part in NOT_OURS or part.endswith(("_cache", ".egg-info")) or part == ".hypothesis"
            for part in path.relative_to(ROOT).parts
        )
    ]


def exposed_metrics() -> set[str]:
    """Names as a scrape shows them, without the series that the library adds to each."""
    pool = {key: 0 for _, key, _ in POOL_GAUGES}
    counters = {"admissions": 0, "double_releases": 0, "moves": 0, "refusals": {}, "releases": {}}
    snapshot: dict[str, Any] = {"version": "0", "ready": True, "uptime_seconds": 0.0}
    snapshot |= {"loop_lag": LoopLag().snapshot()}
    snapshot |= {"pools": [{"engine": "vllm", "upstream": "a", "up": True} | pool], "counters": counters}
    text = Telemetry(lambda: snapshot).render().decode()
    return {
        name for name in re.findall(r"^# TYPE (kvgate_\w+) ", text, re.M) if not name.endswith("_created")
    }


def refused_third() -> Refused:
    """The refusal that README and docs/refusals.md show: two of 670 are in, the third does not fit."""
    gate = Gate(PoolFacts(total_blocks=2048, block_size=1, context=2048, max_seqs=8))
    ask = Ask(prompts=(71,), output_cap=600)
    assert isinstance(gate.ask(ask, 0.0), Granted)
    assert isinstance(gate.ask(ask, 0.0), Granted)
    refused = gate.ask(ask, 0.0)
    assert isinstance(refused, Refused)
    return refused


def without_moment(body: dict[str, Any]) -> dict[str, Any]:
    error = {k: v for k, v in body["error"].items() if k != "retry_after_seconds"}
    return {"keys": sorted(body), "error": error, "has_moment": "retry_after_seconds" in body["error"]}


def test_the_readme_begins_with_the_two_commands_and_is_short() -> None:
    lines = read("README.md").splitlines()
    top = "\n".join(lines[:15])
    assert "$ make demo" in top
    assert "$ make test" in top
    assert len(lines) <= 170
    assert len(read("ARCHITECTURE.md").splitlines()) <= 200


def test_the_commands_of_the_readme_are_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", read("Makefile"), re.M))
    assert {"demo", "serve", "test", "lint", "bench", "clean", "help"} <= targets
    for document in DOCUMENTS:
        named = set(re.findall(r"(?:^\$ |`)make ([a-z-]+)", document.read_text("utf-8"), re.M))
        assert named <= targets, document.name


def test_the_python_of_the_readme_runs_and_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", read("README.md"), re.S)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    (said,) = re.findall(r"^print\(.*\)  # (.*)$", code, re.M)
    assert capsys.readouterr().out.strip() == said


@pytest.mark.parametrize(("name", "language"), [("README.md", "http"), ("docs/refusals.md", "json")])
def test_the_refusal_that_is_shown_is_the_one_that_is_sent(name: str, language: str) -> None:
    (block,) = re.findall(rf"```{language}\n(.*?)```", read(name), re.S)
    shown = json.loads(" ".join(block[block.index("{") :].split()))
    status, _, body = render(refused_third())
    assert status == 429
    assert without_moment(shown) == without_moment(json.loads(body))


def test_every_reason_is_documented_with_its_status() -> None:
    text = read("docs/refusals.md")
    for reason in Reason:
        row = re.search(rf"^\| `{reason.value}` \| (\d+) \| (yes|no) \|", text, re.M)
        assert row, f"{reason.value} has no row"
        assert int(row[1]) == STATUS[reason]
        assert (row[2] == "yes") is reason.is_busy


def test_every_way_to_end_and_every_state_is_documented() -> None:
    text = read("docs/lifecycle.md")
    for ending in Ending:
        assert f"`{ending.value}`" in text
    diagram = text[text.index("```mermaid") :]
    for state in State:
        assert re.search(rf"\b{state.name.lower()}\b", diagram), state


def test_every_metric_in_the_documents_exists_and_every_metric_is_documented() -> None:
    exposed = exposed_metrics()
    operations = read("docs/operations.md")
    for document in DOCUMENTS:
        for name in re.findall(r"\bkvgate_[a-z_]+\b", document.read_text("utf-8")):
            assert name in exposed, f"{document.name}: {name}"
    for name in exposed:
        assert f"`{name}" in operations, name


def test_every_flag_in_the_documents_exists() -> None:
    commands = [main, *main.commands.values()]
    known = {flag for command in commands for each in command.params for flag in each.opts} | OTHER_FLAGS
    for document in DOCUMENTS:
        for name in re.findall(r"(?<![\w-])--[a-z][a-z-]+", document.read_text("utf-8")):
            assert name in known, f"{document.name}: {name}"


def test_the_abort_graces_and_the_safety_fraction_in_the_documents_are_those_of_the_code() -> None:
    graces = f"{ENGINES['llamacpp'].abort_grace:g} s for llama.cpp"
    for name in ("ARCHITECTURE.md", "docs/operations.md"):
        text = " ".join(read(name).split())
        assert graces in text
        assert f"{ENGINES['vllm'].abort_grace:g} s for vLLM" in text
    assert f"{Settings().safety_fraction:.2f} by default" in read("docs/concepts.md")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_files_resolve(document: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text("utf-8")):
        if not link.startswith(("http://", "https://")):
            assert (document.parent / link).exists(), link


def test_files_named_in_the_contributing_page_exist() -> None:
    for room in re.findall(r"^(?:src|tests|benchmarks|examples|docs)/\S*", read("CONTRIBUTING.md"), re.M):
        assert (ROOT / room).is_dir(), room


def test_the_lock_holds_names_and_versions_only() -> None:
    lines = read("requirements.lock").splitlines()
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line), line
    locked = {re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines}
    wanted = re.findall(r'^    "([A-Za-z0-9._-]+)[>=<]', read("pyproject.toml"), re.M)
    assert {re.sub(r"[-_.]+", "-", name).lower() for name in wanted} | {"hatchling"} <= locked


def test_no_file_names_a_registry_or_a_path_of_somebodys_machine() -> None:
    hosts = [".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"))]
    places = ["/" + place + "/" for place in ("root", "home", "work", "Users")]
    # A path stands at the start of a word; `.../work/` inside one is somebody's relative path.
    machine = re.compile("|".join(rf"(?<![\w.\-/*]){re.escape(place)}" for place in places))
    for path in our_files():
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        name = path.relative_to(ROOT)
        assert not any(host in text for host in hosts), name
        assert not machine.search(text), name
