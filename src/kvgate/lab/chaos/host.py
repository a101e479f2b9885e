"""The gateway's own process in a chaos run: the gateway that `kvgate serve` runs, and an auditor's page.

    python -m kvgate.lab.chaos.host < commands, one JSON line each > answers, one JSON line each

Promises: an `audit` answer is of one instant. Nothing of the gateway runs while the ledger, the gauges
as a scrape would render them, the exchanges that own a reservation, and the kernel's list of this
process's sockets are read. The sockets are counted from the descriptors alone, by asking the kernel.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import resource
import socket
import stat
import sys
import threading
import time
import traceback
from collections import Counter
from dataclasses import replace
from typing import Any

import uvloop

from kvgate.config import Settings, at
from kvgate.core.records import PoolFacts
from kvgate.edge.admin import AdminServer
from kvgate.edge.gateway import Gateway
from kvgate.edge.observing import loop_lag
from kvgate.edge.observing.collector import Collector
from kvgate.edge.observing.loop_lag import LoopLag
from kvgate.edge.observing.telemetry import Telemetry

GAUGE = re.compile(r'^kvgate_(\w+)\{engine="\w+",upstream="[^"]*"\} (\S+)$', re.M)
LOOK_SECONDS = 0.01


class Watcher(threading.Thread):
    """Looks, from beside the loop, at what it is doing when it has been silent for a stall."""

    def __init__(self, lag: LoopLag) -> None:
        super().__init__(daemon=True)
        self.lag = lag
        self.seen: list[dict[str, Any]] = []
        self._loop_thread = threading.get_ident()

    def run(self) -> None:
        samples, since = -1, 0.0
        while True:
            time.sleep(LOOK_SECONDS)
            if self.lag.samples != samples:
                samples, since = self.lag.samples, time.monotonic()
            elif time.monotonic() - since > loop_lag.STALL and len(self.seen) < 1000:
                frame = sys._current_frames().get(self._loop_thread)
                where = [f"{f.name}:{f.lineno}" for f in traceback.extract_stack(frame)[-4:]]
                at = time.monotonic() - self.lag.began
                self.seen.append({"at": round(at, 3), "where": " > ".join(where)})
                since = time.monotonic()


class Host:
    """Answers commands about one running gateway."""

    def __init__(self, settings: Settings, facts: PoolFacts) -> None:
        self.gateway = Gateway(settings, facts)
        self.admin = AdminServer(self.gateway, "127.0.0.1", 0)
        self.telemetry = Telemetry(self.gateway.snapshot)
        self.lag = self.gateway.loop_lag
        self.collector = self.gateway.collector = Collector(self.lag.note)

    async def start(self) -> None:
        await self.gateway.start()
        await self.admin.start()
        self.watcher = Watcher(self.lag)
        self.watcher.start()
        self.collector.start()

    def audit(self) -> dict[str, Any]:
        """Everything at one instant: no other callback of the loop runs in between."""
        self.lag.note("audit")
        began = time.monotonic()
        gateway = self.gateway
        snapshot = gateway.snapshot()
        exchanges = [c.exchange for c in gateway.clients if c.exchange is not None]
        held = [e for e in exchanges if e._key is not None]
        gateway.gate.ledger.recount()
        page = {
            "pool": snapshot["pools"][0],
            "counters": snapshot["counters"],
            "gauges": {name: float(value) for name, value in GAUGE.findall(self.telemetry.render().decode())},
            "states": Counter(e.state.name for e in exchanges),
            "owned": len(held),
            "sent": sum(e._connection is not None for e in held),
            "clients": len(gateway.clients),
            "pooled": gateway.pool.open_connections,
            "sockets": upstream_sockets({gateway.port, self.admin.port}),
            "resident": resident(),
        }
        page["audit_seconds"] = time.monotonic() - began
        return page

    def report(self) -> dict[str, Any]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return self.lag.snapshot() | {
            "seen": self.watcher.seen,
            "cpu_seconds": used.ru_utime + used.ru_stime,
            "gc": gc.get_stats(),
        }

    def reload(self, changes: dict[str, Any]) -> None:
        self.lag.note("reload")
        self.gateway.reload(replace(self.gateway.settings, **changes))


def upstream_sockets(own_ports: set[int]) -> int:
    """TCP sockets of this process that it has opened itself, as the kernel knows them.

    One that the far side has reset counts until its descriptor is closed: its local address is still
    known then, while its peer, and its line in /proc/net/tcp, are gone already.
    """
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            fd = int(name)
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            own = socket.socket(fileno=fd)
        except OSError:
            continue  # the descriptor of the listing itself
        try:
            if own.family in (socket.AF_INET, socket.AF_INET6) and own.type & socket.SOCK_STREAM:
                is_listening = own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                count += not is_listening and own.getsockname()[1] not in own_ports
        finally:
            own.detach()
    return count


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def serve(settings: Settings, facts: PoolFacts) -> None:
    host = Host(settings, facts)
    await host.start()
    tell({"port": host.gateway.port, "admin_port": host.admin.port, "pid": os.getpid()})
    commands = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := await commands.readline():
        command = json.loads(line)
        if command["do"] == "audit":
            tell(host.audit())
        elif command["do"] == "report":
            tell(host.report())
        elif command["do"] == "reload":
            host.reload(command["settings"])
            tell(host.audit())
    await host.gateway.stop()
    await host.admin.stop()


def tell(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def main() -> None:
    # Unbuffered, byte by byte, so that nothing of the commands behind it is taken.
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as raw:
        given = json.loads(raw.readline())
    uvloop.run(
        serve(
            Settings(**given["settings"] | {"upstreams": at(*given["settings"]["upstreams"])}),
            PoolFacts(**given["facts"]),
        )
    )


if __name__ == "__main__":
    main()
