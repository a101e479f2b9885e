"""What the relay costs: CPU of the gateway per request and per streamed chunk, beside nginx.

    python benchmarks/relay.py [--quick] [--json FILE]

Everything runs on this machine in one go. The gateway has core 1 to itself; the scripted engine and
this client share core 0. Only CPU time of the gateway's own processes is counted, so a slow client
or engine changes how long the run takes and not the figures. kvgate does its full work: it parses
and prices each body, has the prompt counted by the engine, reserves, writes the cap into the body
and releases. nginx only forwards.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import uvloop

BODY_BYTES = 2048
CONNECTIONS = 16
STREAMS = 200
INTERVAL_MS = 20
TICK = os.sysconf("SC_CLK_TCK")
READY_WITHIN = 20.0

NGINX = """
daemon off; master_process on; worker_processes 1; pid {dir}/nginx.pid; error_log {dir}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {dir}/body; proxy_temp_path {dir}/proxy;
  fastcgi_temp_path {dir}/f; uwsgi_temp_path {dir}/u; scgi_temp_path {dir}/s;
  keepalive_requests 1000000;
  upstream engine {{ server 127.0.0.1:{engine}; keepalive 256; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";
                  proxy_buffering off; }}
  }}
}}
"""


def cores() -> tuple[set[int], set[int]]:
    """(client and engine, gateway): two cores apart where there are two."""
    mine = sorted(os.sched_getaffinity(0))
    return {mine[0]}, {mine[-1] if len(mine) < 2 else mine[1]}


def cpu_seconds(pids: list[int]) -> float:
    """User and system time of these processes, from /proc/PID/stat."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / TICK


@contextmanager
def running(command: list[str], on: set[int]) -> Iterator[subprocess.Popen[str]]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVGATE_")}
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, on),
    )
    try:
        yield child
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        assert child.stdout is not None
        child.stdout.close()


def first_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise SystemExit(f"{child.args} did not start")
    return line


@contextmanager
def kvgate(engine: int, on: set[int]) -> Iterator[tuple[int, list[int]]]:
    command = [sys.executable, "-m", "kvgate", "serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    command += ["--upstream", f"http://127.0.0.1:{engine}", "--engine", "llamacpp", "--block-size", "1"]
    command += ["--total-blocks", "10000000", "--context", "8192"]
    with running(command, on) as child:
        line = first_line(child)
        yield int(line.partition(",")[0].rpartition(":")[2]), [child.pid]


@contextmanager
def nginx(engine: int, on: set[int]) -> Iterator[tuple[int, list[int]]]:
    binary = nginx_binary()
    assert binary is not None
    with tempfile.TemporaryDirectory() as directory:
        port = free_port()
        conf = Path(directory, "nginx.conf")
        conf.write_text(NGINX.format(dir=directory, engine=engine, port=port))
        with running([binary, "-p", directory, "-e", f"{directory}/error.log", "-c", str(conf)], on) as child:
            wait_for(port)
            children = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
            yield port, [child.pid, *map(int, children)]


def nginx_binary() -> str | None:
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(port: int) -> None:
    end = time.monotonic() + READY_WITHIN
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise SystemExit(f"nothing listens on port {port}")


def post(path: str, body: dict[str, Any], script: dict[str, Any], fill: str) -> bytes:
    """A request whose body is exactly BODY_BYTES long, padded inside `fill`."""
    room = BODY_BYTES - len(json.dumps(body))
    if fill == "messages":
        body["messages"][0]["content"] = "word " * (room // 5) + "x" * (room % 5)
    else:  # token ids of 4 characters, each with a comma and a space
        body["prompt"] = [1000 + i % 9000 for i in range(room // 6)]
    data = json.dumps(body).encode().ljust(BODY_BYTES)
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    return f"{head}x-script: {json.dumps(script)}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def chat(stream: bool, script: dict[str, Any]) -> bytes:
    body = {"messages": [{"role": "user", "content": ""}], "max_tokens": 16, "stream": stream}
    return post("/v1/chat/completions", body, script, "messages")


def token_ids(script: dict[str, Any]) -> bytes:
    return post("/v1/completions", {"prompt": [], "max_tokens": 16}, script, "prompt")


class Caller(asyncio.Protocol):
    """Sends the same request again and again until the shared budget is spent."""

    def __init__(self, data: bytes, budget: list[int], done: asyncio.Event) -> None:
        self.data, self.budget, self.done = data, budget, done
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self.data)

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, found, body = self.received.partition(b"\r\n\r\n")
        if not found or len(body) < int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]):
            return
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"not answered: {self.received[:400]!r}")
        self.received = b""
        self.budget[0] -= 1
        if self.budget[0] <= 0:
            self.done.set()
        if self.budget[0] >= CONNECTIONS:
            self.transport.write(self.data)


class Listener(asyncio.Protocol):
    """Reads one stream and counts its events in a shared list."""

    def __init__(self, data: bytes, events: list[int], number: int) -> None:
        self.data, self.events, self.number = data, events, number

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self.data)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.events[self.number] += data.count(b"data: ")


async def per_request(port: int, pids: list[int], data: bytes, requests: int) -> float:
    """Microseconds of gateway CPU for each request."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    budget = [requests + CONNECTIONS]
    before = cpu_seconds(pids)
    made = [
        await loop.create_connection(lambda: Caller(data, budget, done), "127.0.0.1", port)
        for _ in range(CONNECTIONS)
    ]
    await asyncio.wait_for(done.wait(), 120)
    spent = cpu_seconds(pids) - before
    for transport, _ in made:
        transport.abort()
    return spent / (requests + CONNECTIONS) * 1e6


async def per_chunk(port: int, pids: list[int], seconds: float) -> float:
    """Microseconds of gateway CPU for each chunk, while all streams run."""
    loop, events = asyncio.get_running_loop(), [0] * STREAMS
    data = chat(True, {"chunks": int((seconds + 30) * 1000 / INTERVAL_MS), "interval_ms": INTERVAL_MS})
    made = [
        await loop.create_connection(lambda n=number: Listener(data, events, n), "127.0.0.1", port)  # type: ignore[misc]
        for number in range(STREAMS)
    ]
    async with asyncio.timeout(20):
        while min(events) < 3:  # noqa: ASYNC110  (not in the measured part)
            await asyncio.sleep(0.05)
    before, seen = cpu_seconds(pids), sum(events)
    await asyncio.sleep(seconds)
    spent, arrived = cpu_seconds(pids) - before, sum(events) - seen
    for transport, _ in made:
        transport.abort()
    await asyncio.sleep(0.3)
    return spent / arrived * 1e6


def summary(values: list[float]) -> dict[str, Any]:
    return {
        "median_us": round(statistics.median(values), 1),
        "lowest_us": round(min(values), 1),
        "highest_us": round(max(values), 1),
        "repeats": [round(v, 1) for v in values],
    }


async def measure(gateway: Any, engine: int, requests: int, seconds: float, repeats: int) -> dict[str, Any]:
    whole, ids = chat(False, {"chunks": 16}), token_ids({"chunks": 16})
    costs: dict[str, list[float]] = {"request": [], "request_token_ids": [], "chunk": []}
    with gateway(engine, cores()[1]) as (port, pids):
        await per_request(port, pids, whole, 300)  # warm: connections, caches, branches
        for _ in range(repeats):
            costs["request"].append(await per_request(port, pids, whole, requests))
            costs["request_token_ids"].append(await per_request(port, pids, ids, requests))
            costs["chunk"].append(await per_chunk(port, pids, seconds))
    return {name: summary(values) for name, values in costs.items()}


def show(results: dict[str, Any]) -> None:
    labels = {
        "request": f"request, {BODY_BYTES} B chat body",
        "request_token_ids": f"request, {BODY_BYTES} B of token ids",
        "chunk": f"streamed chunk, {STREAMS} streams",
    }
    print("CPU of the gateway in microseconds: median (lowest to highest)\n")
    print(f"{'':34}" + "".join(f"{name:>26}" for name in results))
    for key, label in labels.items():
        cells = []
        for figures in results.values():
            if figures is None:
                cells.append("absent")
            else:
                f = figures[key]
                cells.append(f"{f['median_us']} ({f['lowest_us']} to {f['highest_us']})")
        print(f"{label:34}" + "".join(f"{cell:>26}" for cell in cells))
    print("\nA chat body costs kvgate a counting call to the engine; token ids are counted as they stand.")


async def bench(quick: bool) -> dict[str, Any]:
    requests, seconds, repeats = (2000, 1.0, 2) if quick else (8000, 2.0, 5)
    near, _ = cores()
    os.sched_setaffinity(0, near)
    with running([sys.executable, "-m", "kvgate.lab.scripted_engine", "--port", "0"], near) as child:
        engine = json.loads(first_line(child))["port"]
        results: dict[str, Any] = {"kvgate": await measure(kvgate, engine, requests, seconds, repeats)}
        has_nginx = nginx_binary() is not None
        results["nginx"] = await measure(nginx, engine, requests, seconds, repeats) if has_nginx else None
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about 15 seconds instead of a minute")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there too")
    arguments = parser.parse_args()
    results = uvloop.run(bench(arguments.quick))
    show(results)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"benchmark": "relay", "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
