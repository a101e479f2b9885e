"""Ten thousand slow streams through one gateway on one core: memory, gaps, an accept burst.

    python benchmarks/scale.py [--streams 10000] [--seconds 20] [--burst 2000] [--json FILE]

The gateway, as `kvgate serve` starts it, has one core to itself; the engine and this client, raw
`asyncio.Protocol` processes, share another. Each stream gets a chunk a second that carries the moment
it was written, so that delays are read from the chunks themselves (one machine, one monotonic clock).
They include what the client and the engine add on their crowded core; the client's own lag is shown.
Memory is the gateway's resident memory over what it had with no stream, per stream; buffers inside
the kernel are not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, cast

import uvloop

from kvgate.edge.observing.loop_lag import LoopLag

STAMP = re.compile(rb"data: (\d{12,})\n")
COUNT_PATH = b"/input_tokens"
PER_STREAM_TARGET = 20 * 1024
SOURCE_STREAMS = 20_000  # connections from one loopback address, below the range of ephemeral ports
SLOTS = 100  # the engine writes a hundredth of the streams at a time
OTHER_FILES = 300  # what the gateway opens besides: its reserve, and idle and counting connections
RAMP = 500  # new streams a second
SETTLE_SECONDS = 3.0
BURST_WITHIN = 20.0  # seconds without any answer
TICKS = os.sysconf("SC_CLK_TCK")


def answer(body: bytes, kind: bytes = b"application/json") -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n"
    return head % (kind, len(body)) + body


class EngineConnection(asyncio.Protocol):
    """Answers counts and short requests at once; a stream is handed to the wheel."""

    def __init__(self, wheel: Wheel) -> None:
        self.wheel = wheel
        self.buffer = b""
        self.slot: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while True:
            head, found, rest = self.buffer.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            size = int(length[1]) if length else 0
            if not found or len(rest) < size:
                return
            body, self.buffer = rest[:size], rest[size:]
            if COUNT_PATH in head.partition(b"\r\n")[0]:
                self.transport.write(answer(b'{"input_tokens":10}'))
            elif b'"stream":true' in body.replace(b" ", b""):
                self.wheel.join(self)
            else:
                self.transport.write(answer(b'{"object":"list","data":[]}'))

    def connection_lost(self, exc: Exception | None) -> None:
        self.wheel.leave(self)


class Wheel:
    """Writes to one slot of streams after the other, each stream once in `interval` seconds."""

    def __init__(self, loop: asyncio.AbstractEventLoop, interval: float) -> None:
        self.loop, self.step, self.at, self.joined = loop, interval / SLOTS, 0, 0
        self.slots: list[set[EngineConnection]] = [set() for _ in range(SLOTS)]
        self.due = loop.time()
        self.turn()

    def join(self, connection: EngineConnection) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        connection.transport.write(head)
        connection.slot = self.joined % SLOTS
        self.joined += 1
        self.slots[connection.slot].add(connection)

    def leave(self, connection: EngineConnection) -> None:
        if connection.slot is not None:
            self.slots[connection.slot].discard(connection)

    def turn(self) -> None:
        for connection in self.slots[self.at]:
            event = b'data: %d\ndata: {"choices":[{"delta":{"content":"word"}}]}\n\n' % time.monotonic_ns()
            connection.transport.write(b"%x\r\n%b\r\n" % (len(event), event))
        self.at = (self.at + 1) % SLOTS
        self.due += self.step
        self.loop.call_at(self.due, self.turn)

    def finish(self) -> None:
        """Every stream ends as a stream does."""
        for slot in self.slots:
            for connection in slot:
                connection.transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
                connection.slot = None
            slot.clear()


async def engine(interval: float) -> None:
    """The engine's process: prints its port; SIGUSR1 ends all streams."""
    loop = asyncio.get_running_loop()
    wheel = Wheel(loop, interval)
    server = await loop.create_server(lambda: EngineConnection(wheel), "127.0.0.1", 0, backlog=4096)
    loop.add_signal_handler(signal.SIGUSR1, wheel.finish)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    print(server.sockets[0].getsockname()[1], flush=True)
    await stop.wait()


class Stream(asyncio.Protocol):
    """One client: the delay of every chunk, how it ended."""

    __slots__ = (
        "chunks",
        "done",
        "first",
        "gap",
        "last",
        "on_over",
        "request",
        "status",
        "transport",
        "worst",
    )

    def __init__(self, request: bytes, on_over: Any) -> None:
        self.request = request
        self.on_over = on_over
        self.status = 0
        self.chunks = 0
        self.last = self.first = 0  # delay of the last chunk, moment of the first byte, in ns
        self.worst = self.gap = 0
        self.done = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        if not self.status:
            self.status = int(data[9:12])
            self.first = now
            if b"event-stream" not in data:
                self.over()
                return
        for stamp in STAMP.findall(data):
            delay = now - int(stamp)
            # The gap that was added: how much later than the one before it this chunk came.
            if self.chunks:
                self.gap = max(self.gap, delay - self.last)
            self.last = delay
            self.worst = max(self.worst, delay)
            self.chunks += 1
        # A head may end so, too: with a header whose value is 0.
        if self.chunks and data.endswith(b"0\r\n\r\n"):
            self.over()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done:
            self.on_over(self)

    def over(self) -> None:
        self.done = True
        self.on_over(self)


def post(*, stream: bool) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 16}
    data = json.dumps(body | {"stream": stream}).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n%b" % (
        len(data),
        data,
    )


def raise_limit(wanted: int) -> int:
    """Open files that this process, and those it starts, may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
        except (ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            return hard
        return wanted
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def start(command: list[str], core: int) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVGATE_")}
    return subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )


def first_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise SystemExit(f"{child.args!r} did not start")
    return line


def end(child: subprocess.Popen[str]) -> None:
    child.terminate()
    try:
        child.wait(5)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


class Gateway:
    """Reads a gateway's process from outside."""

    def __init__(self, engine_port: int, core: int) -> None:
        command = ["-m", "kvgate", "serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
        command += ["--upstream", f"http://127.0.0.1:{engine_port}", "--engine", "llamacpp"]
        command += ["--block-size", "1", "--total-blocks", "100000000", "--context", "8192"]
        self.child = start(command, core)
        ports = re.findall(r"127\.0\.0\.1:(\d+)", first_line(self.child))
        self.port, self.admin = int(ports[0]), int(ports[1])

    def stop(self) -> None:
        end(self.child)

    def resident(self) -> int:
        pages = int(Path(f"/proc/{self.child.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.child.pid}/fd"))

    def cpu(self) -> float:
        fields = Path(f"/proc/{self.child.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def status(self) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin}/status", timeout=30) as page:
            return json.loads(page.read())


class Run:
    """One measurement; `figures` fills up as it goes, so that an interrupt shows what there is."""

    def __init__(self, gateway: Gateway, engine_pid: int, seconds: float) -> None:
        self.gateway, self.engine_pid, self.seconds = gateway, engine_pid, seconds
        self.figures: dict[str, Any] = {}
        self.open: set[Stream] = set()
        self.over: list[Stream] = []

    async def open_one(self, number: int, request: bytes) -> Stream:
        loop = asyncio.get_running_loop()
        source = f"127.0.0.{2 + number // SOURCE_STREAMS}"
        stream = Stream(request, self.is_over)
        self.open.add(stream)
        await loop.create_connection(lambda: stream, "127.0.0.1", self.gateway.port, local_addr=(source, 0))
        return stream

    def is_over(self, stream: Stream) -> None:
        self.open.discard(stream)
        self.over.append(stream)

    async def streams(self, number: int) -> None:
        gateway, figures = self.gateway, self.figures
        before = gateway.resident()
        figures["resident_before_mib"] = round(before / 2**20, 1)
        request = post(stream=True)
        began = time.monotonic()
        opened: list[Stream] = []
        while len(opened) < number:
            step = range(len(opened), min(number, len(opened) + RAMP // 10))
            opened += await asyncio.gather(*(self.open_one(n, request) for n in step))
            tell(f"{len(opened)} of {number} streams, {gateway.resident() / 2**20:.0f} MiB")
            await asyncio.sleep(max(0.0, began + len(opened) / RAMP - time.monotonic()))
        await self.until(lambda: all(s.status or s not in self.open for s in opened), 60)
        await asyncio.sleep(SETTLE_SECONDS)
        for stream in opened:  # what the ramp has cost is not what a stream costs
            stream.worst = stream.gap = 0
        cpu, now = gateway.cpu(), time.monotonic()
        lag = LoopLag()
        lag.start(asyncio.get_running_loop())
        for left in range(int(self.seconds), 0, -1):
            tell(f"{len(self.open)} streams, {gateway.resident() / 2**20:.0f} MiB, {left} s left")
            await asyncio.sleep(1.0)
        lag.stop()
        figures["gateway_core"] = round((gateway.cpu() - cpu) / (time.monotonic() - now), 3)
        resident = gateway.resident()
        live = sum(s.status == 200 and not s.done for s in opened)
        chunks = sum(s.chunks for s in opened)
        gaps = sorted(s.gap / 1e6 for s in opened)
        page = await asyncio.to_thread(gateway.status)
        figures |= {
            "streams": live,
            "refused": sum(s.status not in (0, 200) for s in opened),
            "unanswered": sum(not s.status for s in opened),
            "lost": sum(not s.done and s not in self.open for s in opened),
            "resident_mib": round(resident / 2**20, 1),
            "bytes_per_stream": round((resident - before) / max(1, live)),
            "chunks": chunks,
            "longest_delay_ms": round(max(s.worst for s in opened) / 1e6, 1),
            "longest_added_gap_ms": round(gaps[-1], 1),
            "median_of_longest_gaps_ms": round(gaps[len(gaps) // 2], 1),
            "fewest_chunks_of_a_stream": min(s.chunks for s in opened),
            "client_lag_ms": round(lag.longest * 1000, 1),
            "gateway_lag": page.get("loop_lag"),
            "files": gateway.files(),
            "reserved": page["pools"][0]["live"],
        }
        os.kill(self.engine_pid, signal.SIGUSR1)
        await self.until(lambda: not self.open, 60)
        figures["complete"] = sum(s.done for s in opened)
        for stream in opened:
            stream.transport.abort()
        await asyncio.sleep(2.0)
        page = await asyncio.to_thread(gateway.status)
        figures["left_over"] = page["pools"][0]["live"]
        figures["resident_after_mib"] = round(gateway.resident() / 2**20, 1)

    async def until(self, holds: Any, within: float) -> None:
        end = time.monotonic() + within
        while not holds() and time.monotonic() < end:  # noqa: ASYNC110 - thousands set it, one waits
            await asyncio.sleep(0.05)


def tell(text: str) -> None:
    print(f"\r\033[K{text}" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def show(figures: dict[str, Any]) -> None:
    for name, value in figures.items():
        if name == "gateway_lag":
            value = value and {k: v for k, v in value.items() if k not in ("buckets", "stalls")}
        print(f"{name:28} {value}")
    if "bytes_per_stream" in figures:
        is_met = figures["bytes_per_stream"] < PER_STREAM_TARGET
        print(f"target of {PER_STREAM_TARGET} bytes a stream: {'met' if is_met else 'MISSED'}")


def burst(port: int, number: int) -> dict[str, Any]:
    """`number` connections with a request each, as fast as one core makes them, answered or not."""
    request = post(stream=False)
    waiting = selectors.DefaultSelector()
    began = time.monotonic()
    for n in range(number):
        sock = socket.create_connection(("127.0.0.1", port), 10, (f"127.0.0.{2 + n // SOURCE_STREAMS}", 0))
        sock.sendall(request)
        waiting.register(sock, selectors.EVENT_READ)
    connected = time.monotonic() - began
    times: list[float] = []
    lost = 0
    while (left := len(waiting.get_map())) and (events := waiting.select(BURST_WITHIN)):
        for key, _ in events:
            sock = cast(socket.socket, key.fileobj)
            try:
                is_answered = sock.recv(65536).startswith(b"HTTP/1.1 200")
            except OSError:
                is_answered = False
            if is_answered:
                times.append(time.monotonic() - began)
            lost += not is_answered
            waiting.unregister(sock)
            sock.close()
    for key in list(waiting.get_map().values()):
        cast(socket.socket, key.fileobj).close()
    return {
        "connections": number,
        "connected_within_s": round(connected, 3),
        "answered": len(times),
        "refused_or_lost": lost,
        "silent": left,
        "median_s": round(times[len(times) // 2], 3) if times else None,
        "last_s": round(times[-1], 3) if times else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between chunks of a stream")
    parser.add_argument("--burst", type=int, default=2000)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        uvloop.run(engine(arguments.interval))
        return
    wanted = 2 * arguments.streams + OTHER_FILES
    limit = raise_limit(wanted)
    if limit < wanted:
        fits = (limit - OTHER_FILES) // 2
        print(
            f"The hard limit of open files is {limit}, a stream takes 2 of the gateway's: measuring {fits} "
            f"streams, not {arguments.streams}. For all of them: ulimit -Hn {wanted}, as root."
        )
        arguments.streams = fits
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    far = start([__file__, "--engine", "--interval", str(arguments.interval)], cores[0])
    far_port = int(first_line(far))
    gateway = Gateway(far_port, cores[-1])
    run = Run(gateway, far.pid, arguments.seconds)
    try:
        # What is loaded and allocated once; few, so that what they leave free is not taken for free later.
        burst(gateway.port, 20)
        uvloop.run(run.streams(arguments.streams))
        gateway.stop()
        gateway = Gateway(far_port, cores[-1])
        run.figures["burst"] = burst(gateway.port, arguments.burst)
    except KeyboardInterrupt:
        print("\ninterrupted; what there is:")
    finally:
        gateway.stop()
        end(far)
    show(run.figures)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"open_files": limit, **run.figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
