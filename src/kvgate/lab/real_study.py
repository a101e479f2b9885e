"""The rules of `retry_study` against a real engine: llama.cpp in a child process, the gateway before it.

    python -m kvgate.lab.real_study                    a tiny model with random weights
    python -m kvgate.lab.real_study --model FILE.gguf  another one

A burst of clients with three tries each meets a pool that holds two or three of their requests. Every
rule gets an engine and a gateway of its own and the same requests at the same moments (`--seed`), and
is over after `--limit` seconds at the latest. What changes with the rule is when a refused client comes
back and whether it may wait in the line. The figures are this machine's: client, gateway and engine
share its cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TypeAlias

from kvgate.config import Settings, UpstreamSettings
from kvgate.edge.embedded import EmbeddedEngine
from kvgate.edge.gateway import Gateway
from kvgate.lab.retry_world import TRIES, quantile
from kvgate.lab.sse_client import Answer, Cut, post
from kvgate.lab.storm import Outcome, StreamResult, TokenReader, retry_after
from kvgate.lab.storm_plan import Arrivals, Planned, Recipe, Shape, plan
from kvgate.lab.storm_report import herd_of

CELLS, SLOTS = 1024, 8
SAFETY = 0.9  # share of the cells that may be reserved
SHAPES = (Shape(20, 400), Shape(60, 100))
LOOK_EVERY = 0.05  # seconds between two looks at the pool
Wait: TypeAlias = Callable[[float | None, int, Random], float | None]
"""(seconds that the refusal names, tries so far, chance) -> seconds until the next; None: it goes."""


@dataclass(frozen=True, slots=True)
class Rule:
    """When a refused client comes back, and how long it may wait in the line (seconds)."""

    name: str
    wait: Wait
    max_wait: float = 0.0


def _constant(seconds: float) -> Rule:
    return Rule(f"constant {seconds:g} s", lambda told, tries, rng: seconds)


def _backoff(told: float | None, tries: int, rng: Random) -> float:
    """What OpenAI's and Anthropic's libraries do without a header (their source, 2025 and 2026)."""
    return float(min(0.5 * 2 ** (tries - 1), 8.0) * (1 - 0.25 * rng.random()))


def _as_told(told: float | None, tries: int, rng: Random) -> float | None:
    return told


RULES = (
    Rule("instant refusal", lambda told, tries, rng: None),
    Rule("libraries' own backoff", _backoff),
    _constant(1.0),
    _constant(20.0),
    Rule("kvgate, no line", _as_told),
    Rule("kvgate, wait up to 5 s", _as_told, 5.0),
)


@dataclass(slots=True)
class Figures:
    """What one rule did. Moments in seconds from the start; `full`: the pool's reserved share, by look."""

    finished: int = 0
    refused: int = 0
    died: int = 0
    left: int = 0  # still away or being answered when the time was over
    attempts: int = 0
    tokens: int = 0
    waits: list[float] = field(default_factory=list)  # from the first question to the first token
    retries: list[float] = field(default_factory=list)
    ended: float = 0.0  # the last whole answer
    full: list[tuple[float, float]] = field(default_factory=list)

    def full_until(self, moment: float) -> float:
        """How full the pool was on average until then."""
        shares = [share for at, share in self.full if at <= moment]
        return sum(shares) / len(shares) if shares else 0.0


class Burst:
    """One rule meeting one burst at `url`."""

    def __init__(self, rule: Rule, url: str, seed: int) -> None:
        self.rule, self.url, self.rng = rule, url, Random(seed)
        self.figures = Figures()
        self._began = time.perf_counter()

    @property
    def now(self) -> float:
        return time.perf_counter() - self._began

    async def run(self, planned: Sequence[Planned], limit: float, full: Callable[[], float]) -> Figures:
        """Send everything; `full` tells the reserved share of the pool. Over after `limit` seconds."""
        self._began = time.perf_counter()
        looking = asyncio.create_task(self._look(full))
        clients = [asyncio.create_task(self._client(each)) for each in planned]
        _, pending = await asyncio.wait(clients, timeout=limit)
        for task in (looking, *pending):
            task.cancel()
        await asyncio.gather(looking, *pending, return_exceptions=True)
        for task in clients:
            if not task.cancelled():
                task.result()
        self.figures.left = len(pending)
        return self.figures

    async def _look(self, full: Callable[[], float]) -> None:
        while True:
            self.figures.full.append((self.now, full()))
            await asyncio.sleep(LOOK_EVERY)

    async def _client(self, planned: Planned) -> None:
        figures = self.figures
        await asyncio.sleep(planned.at)
        asked = self.now
        headers = {"Idempotency-Key": f"burst-{planned.number}"}
        for tries in range(1, TRIES + 1):
            figures.attempts += 1
            stream, began = StreamResult(), self.now
            reader = TokenReader(stream)
            try:
                body = planned.body(model=None, ignore_eos=True)
                answer: Answer = await post(self.url, body, reader.event, headers)
            except (Cut, OSError):
                figures.died += 1
                return
            if answer.status == 200:
                if reader.verdict()[0] is not Outcome.FINISHED:
                    figures.died += 1
                    return
                figures.finished += 1
                figures.tokens += stream.tokens
                figures.waits.append(began - asked + (stream.seconds_to_first_token or 0.0))
                figures.ended = self.now
                return
            wait = self.rule.wait(retry_after(answer), tries, self.rng) if tries < TRIES else None
            if wait is None:
                break
            await asyncio.sleep(wait)
            headers["x-stainless-retry-count"] = str(tries)
            figures.retries.append(self.now)
        figures.refused += 1


async def measure(
    rule: Rule, engine: EmbeddedEngine, planned: Sequence[Planned], limit: float, seed: int
) -> Figures:
    """One rule against `engine`, through a gateway of its own."""
    settings = Settings(upstreams=(UpstreamSettings(engine.url),), listen_port=0, max_wait=rule.max_wait)
    gateway = Gateway(settings, engine.facts(SAFETY))
    await gateway.start()

    def full() -> float:
        pool = gateway.snapshot()["pools"][0]
        return float(pool["reserved_blocks"] / pool["usable_blocks"])

    try:
        url = f"http://127.0.0.1:{gateway.port}/v1/chat/completions"
        return await Burst(rule, url, seed).run(planned, limit, full)
    finally:
        await gateway.stop()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvgate.lab.real_study", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--model", type=Path, metavar="FILE.gguf")
    parser.add_argument("--clients", type=int, default=96)
    parser.add_argument("--seconds", type=float, default=3.0, help="in which they come")
    parser.add_argument("--limit", type=float, default=70.0, help="seconds for each rule")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", metavar="TEXT", help="only rules whose name holds TEXT")
    options = parser.parse_args(argv)
    recipe = Recipe(options.clients, options.seconds, Arrivals.POISSON, seed=options.seed,
                    rate=options.clients / options.seconds, shapes=SHAPES)  # fmt: skip
    planned = plan(recipe)
    print(f"seed {options.seed}, {len(planned)} clients in {options.seconds:g} s, {os.cpu_count()} cores\n"
          f"{'':24} finished  refused  died  left  attempts  peak  p50 wait  p95 wait  last end  full",
          flush=True)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for rule in RULES:
            if options.only not in rule.name:
                continue
            with EmbeddedEngine.start(
                cells=CELLS, slots=SLOTS, model=options.model or _tiny(Path(folder))
            ) as engine:
                f = asyncio.run(measure(rule, engine, planned, options.limit, options.seed))
            print(
                f"{rule.name:24} {f.finished:8} {f.refused:8} {f.died:5} {f.left:5} "
                f"{f.attempts / max(1, f.finished):9.2f} {herd_of(f.retries)[1]:5} "
                f"{quantile(f.waits, 0.5):9.1f} {quantile(f.waits, 0.95):9.1f} {f.ended:9.1f} "
                f"{f.full_until(f.ended):5.0%}",
                flush=True,
            )
    return 0


def _tiny(folder: Path) -> Path:
    path = folder / "tiny.gguf"
    if not path.exists():
        # Needs numpy and gguf, which only the tests install.
        from kvgate.lab.tiny_gguf import write_tiny_gguf

        write_tiny_gguf(path)
    return path


if __name__ == "__main__":
    sys.exit(main())
