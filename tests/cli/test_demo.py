"""`kvgate demo` on the tiny model: its figures, and what its exit status says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvgate.cli.demo import demo
from kvgate.lab.tiny_gguf import write_tiny_gguf

SMALL = ["--cells", "1024", "--max-tokens", "100"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(demo, [str(a) for a in arguments], env={"COLUMNS": "160"})


def test_a_storm_that_kills_without_the_gate_and_not_with_it_exits_0(model: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    result = run(*SMALL, "--model", model, "--json", figures)
    assert result.exit_code == 0, result.output
    for row in ("streams asked", "died mid-answer", "finished whole", "refusals / retries",
                "tokens delivered whole", "tokens thrown away", "longest stall", "wall time"):  # fmt: skip
        assert row in result.output
    assert "Without a reservation 8 of 8 streams died (Context size has been exceeded.)" in result.output
    runs = json.loads(figures.read_text())["runs"]
    assert (runs["direct"]["died"], runs["gated"]["died"]) == (8, 0)
    assert runs["gated"]["finished"] == 8
    assert runs["gated"]["tokens_whole"] == 800


def test_a_storm_too_weak_to_kill_exits_1_and_says_so(model: Path) -> None:
    result = run(*SMALL, "--model", model, "--streams", 2)
    assert result.exit_code == 1
    assert "the storm was too weak" in result.output


def test_streams_that_can_never_fit_exit_1_and_say_so(model: Path) -> None:
    result = run("--cells", 1024, "--max-tokens", 1000, "--model", model)
    assert result.exit_code == 1
    assert "8 streams never got through the gate" in result.output


def test_strategies_shows_all_four_and_marks_three_unsafe(model: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    result = run(*SMALL, "--model", model, "--strategies", "--json", figures)
    assert result.exit_code == 0, result.output
    for label in ("none (unsafe)", "concurrency cap (unsafe)", "prompt length only (unsafe)"):
        assert label in result.output
    runs = json.loads(figures.read_text())["runs"]
    assert list(runs) == ["none", "concurrency", "prompt_only", "worst_case"]
    assert runs["none"]["died"] > 0
    assert runs["worst_case"]["died"] == 0
    assert runs["worst_case"]["finished"] == 8


def test_a_model_that_cannot_be_loaded_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"this is no model")
    result = run("--model", broken)
    assert result.exit_code == 1
    assert "llama.cpp did not start" in result.output
