"""kvgate's books beside the engine's own figures, several times a second while a load runs.

vLLM's page is as old as its last step, so its use is compared with the most that was reserved since
the sample before. More in use than that is a price that is too low.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx

PERIOD = 0.2
_USE = re.compile(r"^vllm:kv_cache_usage_perc\{[^}]*\} (\S+)$", re.M)


@dataclass(frozen=True)
class Sample:
    """Blocks. `reserved`: the most by the ledger since the sample before, with what is kept back for
    all requests together; `used`: by the engine's word."""

    reserved: int
    used: int
    usable: int
    total: int
    waiting: int
    fraction: float


@dataclass
class Books:
    """The samples of one load."""

    samples: list[Sample] = field(default_factory=list)
    uses: list[float] = field(default_factory=list)  # shares of the pool, by the engine's word
    errors: list[str] = field(default_factory=list)

    @property
    def over(self) -> list[Sample]:
        """Where the engine used more than was reserved."""
        return [sample for sample in self.samples if sample.used > sample.reserved]

    @property
    def fill(self) -> float:
        """How much of the pool was reserved while somebody waited; 0 where nobody did."""
        busy = [sample.reserved / sample.total for sample in self.samples if sample.waiting]
        return sum(busy) / len(busy) if busy else 0.0

    @property
    def most_used(self) -> float:
        """The highest share of the pool in use."""
        return max(self.uses, default=0.0)

    @property
    def mean_used(self) -> float:
        return sum(self.uses) / len(self.uses) if self.uses else 0.0


@contextlib.contextmanager
def compared(engine: str, admin: str | None, period: float = PERIOD) -> Iterator[Books]:
    """Sample until the `with` ends; without kvgate's `admin` only the engine, so that both cost it alike."""
    books, stop = Books(), threading.Event()
    watcher = threading.Thread(target=_watch, args=(engine, admin, period, books, stop), daemon=True)
    watcher.start()
    try:
        yield books
    finally:
        stop.set()
        watcher.join(30)


def _watch(engine: str, admin: str | None, period: float, books: Books, stop: threading.Event) -> None:
    last = 0

    def pool() -> dict[str, float]:
        found: dict[str, float] = client.get(f"{admin}/status").json()["pools"][0] if admin else {}
        return found

    with httpx.Client(timeout=30) as client:
        while not stop.is_set():
            started = time.monotonic()
            try:
                before = pool()
                page = client.get(f"{engine}/metrics").text
                after = pool()
            except httpx.TransportError as failed:
                books.errors.append(str(failed))
                continue
            share = _USE.search(page)
            assert share is not None, "vLLM's page shows no use of its cache"
            books.uses.append(float(share[1]))
            if after:
                now = max(_held(before), _held(after))
                books.samples.append(
                    Sample(
                        reserved=max(last, now),
                        used=round(float(share[1]) * after["total_blocks"]),
                        usable=int(after["usable_blocks"]),
                        total=int(after["total_blocks"]),
                        waiting=int(min(before["waiting"], after["waiting"])),
                        fraction=after["safety_fraction"],
                    )
                )
                last = now
            stop.wait(max(0.0, period - (time.monotonic() - started)))


def _held(pool: dict[str, float]) -> int:
    """Blocks reserved, and those that the fraction would allow and the pool keeps back for all."""
    allowed = math.floor(pool["total_blocks"] * pool["safety_fraction"] + 1e-9)
    return int(pool["reserved_blocks"] + allowed - pool["usable_blocks"])
