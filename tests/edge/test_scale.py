"""A thousand streams at once, and what happens where the system allows fewer files than that."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import READY, Client, Engine, get_json, request

SCALE = Path(__file__).parents[2] / "benchmarks" / "scale.py"
STREAMS, BURST = 1000, 500
# The target is 20 KiB; a fresh process also grows once, which a thousand streams share.
BYTES_PER_STREAM_MAX = 40 * 1024
FILES = 300


@pytest.mark.slow
def test_a_thousand_streams_are_all_served_to_their_end_in_bounded_memory(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, str(SCALE), "--streams", str(STREAMS), "--burst", str(BURST), "--seconds", "3"]
    done = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(file.read_text())
    assert figures["streams"] == figures["reserved"] == figures["complete"] == STREAMS, figures
    assert figures["refused"] == figures["left_over"] == 0, figures
    assert figures["fewest_chunks_of_a_stream"] > 0, figures
    assert figures["bytes_per_stream"] < BYTES_PER_STREAM_MAX, figures
    # Two for each stream, and a bounded number besides.
    assert 2 * STREAMS <= figures["files"] <= 2 * STREAMS + 300, figures
    assert figures["burst"]["answered"] == BURST, figures


class Limited:
    """A gateway that may open `FILES` files, and the engine behind it."""

    def __init__(self, errors: Path) -> None:
        self.engine = Engine()
        self.errors = errors
        command = ["-m", "kvgate", "serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
        command += ["--upstream", f"http://127.0.0.1:{self.engine.port}", "--engine", "llamacpp"]
        command += ["--block-size", "1", "--total-blocks", "1000000", "--context", "4096"]
        command += ["--client-timeout", "5", "--abort-grace", "0.2"]
        with errors.open("w") as stderr:
            self.child = subprocess.Popen(
                [sys.executable, *command],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES)),
            )
        assert self.child.stdout is not None
        ready = READY.match(self.child.stdout.readline())
        assert ready is not None, errors.read_text()
        self.port, self.admin_port = int(ready[1]), int(ready[2])

    def stop(self) -> None:
        self.child.terminate()
        try:
            self.child.wait(10)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        assert self.child.stdout is not None
        self.child.stdout.close()
        self.engine.kill()


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Limited]:
    started = Limited(tmp_path / "errors")
    yield started
    started.stop()


async def test_where_files_run_short_the_operator_is_told_and_clients_are_turned_away(
    limited: Limited,
) -> None:
    told = limited.errors.read_text()
    assert f"open {FILES} files" in told, told
    assert "ulimit -Hn" in told, told
    carried = int(re.findall(r"carries (\d+) client connections", told)[0])
    assert 1 <= carried < FILES / 2
    ask = request(script={"chunks": 2000, "interval_ms": 20})
    inside = [await Client.connect(limited.port) for _ in range(carried)]
    for client in inside:
        client.send(ask)
        await client.events(1)
        assert client.current.status == 200
    outside = await Client.connect(limited.port)
    outside.send(ask)
    answer = await outside.response()
    assert answer.status == 503
    assert answer.header("retry-after") is not None
    assert "--max-connections" in answer.json["error"]["message"]
    # Nobody inside has noticed, and a place that is left can be had.
    seen = [client.current.body.count(b"data: ") for client in inside]
    for client, before in zip(inside, seen, strict=True):
        await client.events(before + 2)
        assert not client.closed.is_set()
    inside[0].cut()
    await _until_fewer(limited, carried)
    late = await Client.connect(limited.port)
    late.send(request(script={"chunks": 1}))
    assert (await late.response()).status == 200
    for client in (*inside, outside, late):
        client.cut()


async def _until_fewer(limited: Limited, carried: int) -> None:
    async with asyncio.timeout(10.0):
        while get_json(limited.admin_port, "/status")["client_connections"] >= carried:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
