"""What the scripted engine has seen: counters, the last requests, a log of each marked request, and
the KV cache that its running streams would hold.

Promise: no I/O and no clock of its own; the engine says what happens and when.
"""

from __future__ import annotations

import json
import re
from collections import deque
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol

KEPT = 64  # requests remembered for /script/stats
KEPT_BYTES = 65536  # of each body
PLANS_MAX = 2048
# A request is tied to its plan by this text in its target or body: the only things that every
# gateway passes on. Headers are often dropped.
MARKER = re.compile(rb"kgc-([0-9a-z]+)")


@dataclass(slots=True)
class Request:
    method: str = ""
    path: str = ""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""
    keep_alive: bool = True
    version: str = "1.1"

    def header(self, name: bytes) -> bytes:
        return next((v for k, v in self.headers if k.lower() == name), b"")

    def shown(self) -> dict[str, Any]:
        heads = [(k.decode("latin-1").lower(), v.decode("latin-1")) for k, v in self.headers]
        return {"method": self.method, "path": self.path, "headers": heads, "body": self.body[:KEPT_BYTES]}

    def marker(self) -> str | None:
        found = MARKER.search(self.path.encode("latin-1")) or MARKER.search(self.body)
        return found[1].decode() if found else None


@dataclass(slots=True)
class Record:
    """The life of one marked request as the engine saw it. Times in seconds of the engine's loop."""

    marker: str
    kind: str  # generation | count | other
    method: str
    path: str
    headers: list[tuple[str, str]]
    body: str
    body_bytes: int
    connection: int  # which connection of the engine, numbered from 1
    arrived: float
    sent_bytes: int = 0  # handed to the transport
    ended: float | None = None
    how: str | None = None  # whole | client left | engine broke off


class Holder(Protocol):
    """A running generation, which holds some of the cache."""

    def overflowed(self) -> None: ...


class Cache:
    """The KV cache of the running streams, in tokens; `tokens` 0 is a cache without end.

    As llama.cpp with its unified cache: when it overflows, every running stream dies.
    """

    def __init__(self, tokens: int = 0) -> None:
        self.tokens = tokens
        self.used = 0
        self.peak = 0
        self.overflows = 0
        self._holders: dict[Holder, None] = {}  # in the order in which they came

    def take(self, holder: Holder, tokens: int) -> bool:
        """False where the cache overflows."""
        self._holders[holder] = None
        self.used += tokens
        self.peak = max(self.peak, self.used)
        if not self.tokens or self.used <= self.tokens:
            return True
        self.overflows += 1
        return False

    def give_back(self, holder: Holder, tokens: int) -> None:
        self._holders.pop(holder, None)
        self.used -= tokens

    def holders(self) -> list[Holder]:
        return list(self._holders)

    def shown(self) -> dict[str, int]:
        return {"tokens": self.tokens, "used": self.used, "peak": self.peak, "overflows": self.overflows}


@dataclass(slots=True)
class Books:
    """What the engine has seen, for /script/stats and /script/log."""

    connections: int = 0
    requests: int = 0
    generations: int = 0
    counts: int = 0
    unfinished: int = 0  # generations that did not come to their end
    garbled: int = 0  # times that a connection's bytes were not HTTP
    open: int = 0  # generations whose connection stands
    busy: int = 0  # generations that run, with or without a client
    max_concurrent: int = 0  # most of `busy` at one time
    cache: Cache = field(default_factory=Cache)
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT))
    plans: dict[str, bytes] = field(default_factory=dict)
    log: dict[str, list[Record]] = field(default_factory=dict)

    def started(self) -> None:
        self.generations += 1
        self.open += 1
        self.busy += 1
        self.max_concurrent = max(self.max_concurrent, self.busy)

    def reset(self) -> None:
        """Start the counters anew; what runs now still counts."""
        self.recent.clear()
        self.requests = self.generations = self.counts = 0
        self.max_concurrent = self.busy
        self.cache.peak, self.cache.overflows = self.cache.used, 0

    def plan(self, page: bytes) -> None:
        """Set what the requests with these markers get: `{"marker": script, ...}`."""
        for marker, script in json.loads(page).items():
            self.plans[marker] = json.dumps(script).encode()
            self.log[marker] = []
        while len(self.plans) > PLANS_MAX:
            oldest = next(iter(self.plans))
            del self.plans[oldest], self.log[oldest]

    def record(self, request: Request, kind: str, connection: int, now: float) -> Record | None:
        """A log entry for a request whose marker is planned; None for every other."""
        marker = request.marker() if self.plans else None
        if marker is None or marker not in self.plans:
            return None
        shown = request.shown()
        record = Record(
            marker=marker,
            kind=kind,
            method=request.method,
            path=request.path,
            headers=shown["headers"],
            body=shown["body"].decode("utf-8", "replace"),
            body_bytes=len(request.body),
            connection=connection,
            arrived=now,
        )
        self.log[marker].append(record)
        return record

    def log_page(self, markers: list[str]) -> bytes:
        return json.dumps([asdict(r) for marker in markers for r in self.log.get(marker, ())]).encode()

    def page(self) -> bytes:
        hidden = ("recent", "plans", "log", "cache")
        shown = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in hidden}
        recent = [{**r, "body": r["body"].decode("utf-8", "replace")} for r in self.recent]
        return json.dumps({**shown, "cache": self.cache.shown(), "recent": recent}).encode()
