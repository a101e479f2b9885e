"""`kvgate storm` as a user runs it: against a real server process, bounded, and stopped with Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvgate.cli.storm import storm


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    command = [sys.executable, "-m", "kvgate.lab.scripted_engine", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}"
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


def run(*args: str) -> Result:
    return CliRunner().invoke(storm, args)


def test_it_reports_and_writes_its_figures_and_a_picture(engine: str, tmp_path: Path) -> None:
    figures, picture = tmp_path / "storm.json", tmp_path / "storm.svg"
    result = run(engine, "--requests", "30", "--keys", "2", "--json", str(figures), "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert "finished whole" in result.output
    assert json.loads(figures.read_text())["finished"] == 30
    assert picture.read_text().lstrip().startswith("<?xml")


def test_a_trace_is_replayed(engine: str, tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,10,3\n10,10,3\n20,10,3\n")
    result = run(engine, "--trace", str(trace), "--speed", "100")
    assert result.exit_code == 0, result.output
    assert "3 requests at most, trace" in result.output


def test_an_address_of_another_machine_is_asked_about_first() -> None:
    result = run("http://192.0.2.1:8000", "--requests", "1")
    assert result.exit_code == 1
    assert "not this machine" in result.output


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["ftp://x"], "not an address"),
        (["127.0.0.1:1", "--shape", "5"], "PROMPT:CAP"),
        (["127.0.0.1:1", "--clients", "polite"], "none of obeying"),
        (["127.0.0.1:1", "--trace", __file__], "no trace"),
    ],
)
def test_a_mistake_is_told_in_one_message(args: list[str], says: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert says in result.output
    assert "Traceback" not in result.output


def test_a_server_that_is_not_there_is_a_failure() -> None:
    result = run("127.0.0.1:1", "--requests", "2")
    assert result.exit_code == 1
    assert "cut" in result.output


def test_ctrl_c_prints_the_figures_so_far(engine: str) -> None:
    command = [sys.executable, "-c", "from kvgate.cli.storm import storm; storm()", engine]
    command += ["--arrivals", "poisson", "--rate", "50", "--requests", "100000", "--seconds", "300"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "requests at most" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    shown = process.communicate(timeout=30)[0]
    assert "(stopped)" in shown
    assert process.returncode == 0
