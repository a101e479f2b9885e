"""`kvgate serve` as the real process: its ready line, its ways to end, and what it says of mistakes."""

from __future__ import annotations

import http.client
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvgate.cli import main
from kvgate.cli import serve as serve_module
from kvgate.edge.embedded import EmbeddedEngine, EmbeddedUnavailable

PATIENCE = 30.0
READY = re.compile(
    r"^kvgate listening on http://127\.0\.0\.1:(\d+), admin on http://127\.0\.0\.1:(\d+), "
    r"engine (\w+) at (http://127\.0\.0\.1:\d+)\n$"
)
CHAT = {"messages": [{"role": "user", "content": "Tell me a story"}], "max_tokens": 10, "stream": True}
HANG = {"chunks": 5, "fault": "hang_mid"}


class Process:
    """A child of the test: its output is read with a deadline, and it is gone after the test."""

    def __init__(self, *arguments: str) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("KVGATE_")}
        self.popen = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def line(self) -> str:
        """The next line on stdout."""
        assert self.popen.stdout is not None
        text = b""
        deadline = time.monotonic() + PATIENCE
        with selectors.DefaultSelector() as selector:
            selector.register(self.popen.stdout, selectors.EVENT_READ)
            while not text.endswith(b"\n"):
                assert selector.select(deadline - time.monotonic()), "no line in time"
                piece = os.read(self.popen.stdout.fileno(), 1)
                if not piece:
                    break
                text += piece
        return text.decode()

    def end(self, timeout: float = PATIENCE) -> tuple[int, str, str]:
        """Exit status, the rest of stdout, stderr."""
        out, err = self.popen.communicate(timeout=timeout)
        return self.popen.returncode, out.decode(), err.decode()

    def children(self) -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.communicate()


@contextmanager
def process(*arguments: str) -> Iterator[Process]:
    started = Process(*arguments)
    try:
        yield started
    finally:
        started.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[int]:
    with process("kvgate.lab.scripted_engine", "--port", "0") as scripted:
        yield int(json.loads(scripted.line())["port"])


class Serving:
    """A ready gateway in front of the scripted engine."""

    def __init__(self, child: Process) -> None:
        self.process = child
        self.ready = child.line()
        match = READY.match(self.ready)
        assert match, self.ready
        self.port, self.admin, self.engine, self.upstream = int(match[1]), int(match[2]), match[3], match[4]

    @contextmanager
    def post(self, script: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        headers = {"content-type": "application/json", "x-script": json.dumps(script)}
        client.request("POST", "/v1/chat/completions", json.dumps(CHAT), headers)
        with closing(client), client.getresponse() as answer:
            yield answer

    def page(self, path: str) -> tuple[int, Any]:
        client = http.client.HTTPConnection("127.0.0.1", self.admin, timeout=PATIENCE)
        try:
            client.request("GET", path)
            response = client.getresponse()
            return response.status, json.loads(response.read())
        finally:
            client.close()

    def until(self, path: str, field: str, value: object) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.page(path)[1][field] != value:
            assert time.monotonic() < deadline, f"{path} never said {field} = {value}"


def sizes(engine: int) -> list[str]:
    return [
        *("--upstream", f"http://127.0.0.1:{engine}", "--engine", "llamacpp", "--total-blocks", "2048"),
        *("--block-size", "1", "--context", "2048", "--max-seqs", "8", "--listen", "127.0.0.1:0"),
        *("--admin", "127.0.0.1:0"),
    ]


@contextmanager
def serving(engine: int, *options: str) -> Iterator[Serving]:
    with process("kvgate", "serve", *sizes(engine), *options) as child:
        yield Serving(child)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


def test_the_ready_line_names_ports_that_answer(engine: int) -> None:
    with serving(engine) as gate:
        assert (gate.engine, gate.upstream) == ("llamacpp", f"http://127.0.0.1:{engine}")
        with gate.post({"chunks": 3}) as answer:
            assert answer.status == 200
            assert answer.read().endswith(b"data: [DONE]\n\n")
        assert gate.page("/readyz") == (200, {"ready": True})
        status, shown = gate.page("/status")
        assert status == 200
        pool = shown["pools"][0]
        assert {
            "engine": "llamacpp",
            "total_blocks": 2048,
            "usable_blocks": 1843,
            "context": 2048,
        }.items() <= (pool.items())
        assert shown["counters"]["admissions"] == 1


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_running_answer_finish_and_exits_with_0(
    engine: int, ending: signal.Signals
) -> None:
    with serving(engine) as gate, gate.post({"chunks": 20, "interval_ms": 50}) as answer:
        os.kill(gate.process.pid, ending)
        gate.until("/status", "draining", True)
        assert gate.page("/readyz")[0] == 503
        assert answer.read().endswith(b"data: [DONE]\n\n")
        status, out, err = gate.process.end()
        assert (status, out) == (0, "")
        assert "Traceback" not in err


def test_a_drain_does_not_outlast_its_limit(engine: int) -> None:
    with serving(engine, "--drain-timeout", "0.2") as gate, gate.post(HANG):
        os.kill(gate.process.pid, signal.SIGTERM)
        status, _, err = gate.process.end(timeout=10)
        assert status == 0
        assert "Traceback" not in err


def test_a_second_interrupt_ends_at_once(engine: int) -> None:
    with serving(engine) as gate, gate.post(HANG):
        os.kill(gate.process.pid, signal.SIGINT)
        gate.until("/status", "draining", True)
        os.kill(gate.process.pid, signal.SIGINT)
        status, _, err = gate.process.end(timeout=5)
        assert status == serve_module.INTERRUPTED
        assert "Ctrl-C again" in err
        assert "Traceback" not in err


@pytest.mark.parametrize("option", ["--listen", "--admin"])
def test_a_taken_port_is_one_clear_error(engine: int, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with process("kvgate", "serve", *sizes(engine), option, address) as child:
            status, out, err = child.end()
    assert (status, out) == (1, "")
    assert f"cannot listen on {address}: Address already in use" in err
    assert f"{option} HOST:PORT" in err
    assert "Traceback" not in err


def interrupt_twice(gate: Serving) -> None:
    os.kill(gate.process.pid, signal.SIGINT)
    os.kill(gate.process.pid, signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["term", "interrupt twice", "kill"])
def test_the_embedded_engine_never_outlives_the_command(ending: str) -> None:
    options = ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--embedded-cells", "512"]
    with process("kvgate", "serve", *options) as child:
        gate = Serving(child)
        (embedded,) = child.children()
        assert gate.page("/status")[1]["pools"][0]["total_blocks"] == 512
        if ending == "interrupt twice":
            interrupt_twice(gate)
        else:
            os.kill(child.pid, signal.SIGTERM if ending == "term" else signal.SIGKILL)
        status, _, err = child.end()
        wait_gone(embedded)
    assert "Traceback" not in err
    assert "starting llama.cpp" in err
    # Two interrupts at once may be one to the kernel; both endings are right.
    assert status in {"term": (0,), "interrupt twice": (0, 130), "kill": (-signal.SIGKILL,)}[ending]


def test_without_the_extra_the_error_has_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(**_: Any) -> EmbeddedEngine:
        raise EmbeddedUnavailable("no llama.cpp here: pip install 'kvgate[embedded]'")

    monkeypatch.setattr(EmbeddedEngine, "start", start)
    # Run inside the test's own process, which keeps its handlers.
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    answer = CliRunner().invoke(main, ["serve"])
    assert answer.exit_code == 1
    assert "pip install 'kvgate[embedded]'" in answer.output
    assert "--upstream URL" in answer.output


def test_what_an_engine_does_not_tell_is_named_with_the_option_that_gives_it(engine: int) -> None:
    options = ["--upstream", f"http://127.0.0.1:{engine}", "--engine", "generic", "--listen", "127.0.0.1:0"]
    with process("kvgate", "serve", *options, "--admin", "127.0.0.1:0") as child:
        status, out, err = child.end()
    assert (status, out) == (2, "")
    assert f"http://127.0.0.1:{engine}: total_blocks: " in err
    assert "--total-blocks N" in err
    assert "Traceback" not in err


def test_an_engine_that_is_not_there_yet_is_waited_for(engine: int) -> None:
    options = ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    with process("kvgate", "serve", "--upstream", "http://127.0.0.1:9", *options) as child:
        gate = Serving(child)
        assert gate.page("/readyz")[0] == 503
        with gate.post({}) as answer:
            assert answer.status == 503
            assert answer.getheader("x-kvgate-reason") == "engine_unavailable"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--total-blocks", "9"], "--total-blocks: only with --upstream"),
        (["--engine", "vllm"], "--engine vllm: only with --upstream"),
        (
            [
                *("--upstream", "http://127.0.0.1:9", "--engine", "vllm", "--total-blocks", "1"),
                *("--block-size", "16", "--context", "9"),
            ],
            "leaves no usable block",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: list[str], words: str) -> None:
    answer = CliRunner().invoke(main, ["serve", *options])
    assert answer.exit_code == 2
    assert words in answer.output


def test_the_help_shows_an_example_of_every_command() -> None:
    shown = CliRunner().invoke(main, ["--help"]).output
    for command in main.commands:
        assert f"\n    kvgate {command}" in shown
    assert CliRunner().invoke(main, ["--version"]).output.startswith("kvgate, version ")
