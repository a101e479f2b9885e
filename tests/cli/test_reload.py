"""Options that are read again while kvgate serves: by SIGHUP and by POST /reload; streams live on."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import selectors
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_serve import HANG, PATIENCE, Process, Serving, process, sizes

SLOW = {"chunks": 30, "interval_ms": 50}


@pytest.fixture(scope="module")
def engine() -> Iterator[int]:
    with process("kvgate.lab.scripted_engine", "--port", "0") as scripted:
        yield int(json.loads(scripted.line())["port"])


def stderr_until(child: Process, words: str) -> str:
    """What stderr says, up to the line with these words in it. Reads past no buffer of ours."""
    assert child.popen.stderr is not None
    said = b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.popen.stderr, selectors.EVENT_READ)
        while words.encode() not in said or not said.endswith(b"\n"):
            assert selector.select(PATIENCE), f"stderr never said {words!r}, only {said!r}"
            piece = os.read(child.popen.stderr.fileno(), 4096)
            assert piece, f"stderr ended without {words!r}"
            said += piece
    return said.decode()


def reloaded(gate: Serving) -> tuple[int, Any]:
    client = http.client.HTTPConnection("127.0.0.1", gate.admin, timeout=PATIENCE)
    try:
        client.request("POST", "/reload")
        answer = client.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        client.close()


def test_a_hangup_swaps_the_limits_and_a_running_stream_ends_as_it_would_have(
    engine: int, tmp_path: Path
) -> None:
    file = tmp_path / "kvgate.toml"
    file.write_text('safety-fraction = 0.5\nlisten = "127.0.0.1:0"\n')
    with process("kvgate", "serve", "--config", str(file), *sizes(engine)) as child:
        gate = Serving(child)
        assert gate.page("/status")[1]["pools"][0]["usable_blocks"] == 1024
        with gate.post(SLOW) as stream:
            first = stream.read(10)
            file.write_text("safety-fraction = 0.25\nmax-body-bytes = 20\nembedded-cells = 99\n")
            os.kill(child.pid, signal.SIGHUP)
            said = stderr_until(child, "embedded-cells")
            assert "--safety-fraction 0.5 -> 0.25" in said
            assert "--max-body-bytes 33554432 -> 20" in said
            assert "--embedded-cells stays 2048, not 99: it needs a restart" in said
            pool = gate.page("/status")[1]["pools"][0]
            assert (pool["usable_blocks"], pool["live"]) == (512, 1)
            assert (first + stream.read()).endswith(b"data: [DONE]\n\n")
        with gate.post({}) as answer:
            assert answer.status == 413
            assert b"--max-body-bytes" in answer.read()


def test_a_reload_by_the_admin_port_says_what_it_did(engine: int, tmp_path: Path) -> None:
    file = tmp_path / "kvgate.toml"
    file.write_text("max-wait = 1.0\n")
    with process("kvgate", "serve", "--config", str(file), *sizes(engine)) as child:
        gate = Serving(child)
        assert reloaded(gate) == (200, {"changed": {}, "needs_restart": {}})
        file.write_text('max-wait = 2.0\nallow-path = ["/tokenize"]\nmax-seqs = 3\nadmin = "127.0.0.1:1"\n')
        # A flag beats the file also when both are read again: --max-seqs and --admin are flags here.
        assert reloaded(gate) == (
            200,
            {
                "changed": {
                    "max_wait": {"from": 1.0, "to": 2.0},
                    "allow_paths": {"from": [], "to": ["/tokenize"]},
                },
                "needs_restart": {},
            },
        )
        for wrong, words in (
            ("max-wiat = 3\n", "Did you mean 'max-wait'?"),
            ("max-wait = -3\n", "--max-wait"),
            ("safety-fraction = 0.0001\n", "leaves no usable block"),
            (f"tls-key = '{file}'\n", "--tls-key needs --tls-cert"),
        ):
            file.write_text(wrong)
            status, answer = reloaded(gate)
            assert status == 400
            assert words in answer["error"]["message"]
        file.write_text('max-wait = 2.0\nallow-path = ["/tokenize"]\n')
        assert reloaded(gate) == (200, {"changed": {}, "needs_restart": {}})
        os.kill(child.pid, signal.SIGTERM)
        status, _, err = child.end()
        assert status == 0
        assert "Traceback" not in err


def test_a_second_term_ends_at_once(engine: int) -> None:
    with process("kvgate", "serve", *sizes(engine)) as child:
        gate = Serving(child)
        with gate.post(HANG):
            os.kill(child.pid, signal.SIGTERM)
            gate.until("/status", "draining", True)
            assert gate.page("/readyz") == (503, {"ready": False})
            os.kill(child.pid, signal.SIGTERM)
            status, _, err = child.end(timeout=5)
    assert status == 128 + signal.SIGTERM
    assert "Traceback" not in err


def test_a_stream_that_outlasts_the_drain_is_told_so_in_an_event(engine: int) -> None:
    """FC-50."""
    with process("kvgate", "serve", *sizes(engine), "--drain-timeout", "0.3") as child:
        gate = Serving(child)
        with gate.post(HANG) as stream:
            os.kill(child.pid, signal.SIGTERM)
            text = stream.read()
        status, _, err = child.end(timeout=10)
    assert status == 0
    event = [line for line in text.split(b"\n") if line.startswith(b"data: ")][-1]
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "draining"
    assert "Traceback" not in err


def test_a_request_on_a_kept_connection_is_told_of_the_drain(engine: int) -> None:
    with process("kvgate", "serve", *sizes(engine)) as child:
        gate = Serving(child)
        asked = b"GET /v1/models HTTP/1.1\r\nHost: t\r\n\r\n"

        async def run() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", gate.port)
            with gate.post(HANG):
                os.kill(child.pid, signal.SIGTERM)
                await asyncio.to_thread(gate.until, "/status", "draining", True)
                writer.write(asked)
                answer = await reader.read()
            writer.close()
            return answer

        answer = asyncio.run(run())
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b'"code": "draining"' in answer
    assert b"\r\nretry-after: " in answer
