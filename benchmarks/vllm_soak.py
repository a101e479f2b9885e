"""Adversarial load on a real vLLM, directly and through kvgate with a safety fraction that finds itself.

    python benchmarks/vllm_soak.py --minutes 10        needs vLLM in .venv-vllm (make test-vllm)

One tiny model with random weights and a small pool, so that its cache and not its arithmetic is what
runs out. Clients come back at once: many of them, short prompts with large caps, long prompts, two
choices, caps that nobody set, and some that leave in the middle. Printed: preemptions, the worst gap
between two pieces of a running stream, tokens a second, and what kvgate's correction did.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
START_SECONDS = 300
MODEL = "tiny"


@dataclass
class Tally:
    """What one load of so many seconds came to."""

    how: str
    seconds: float
    preemptions: int
    worst_stall: float
    stalls_over_100ms: int
    tokens_per_second: float
    finished: int
    cancelled: int
    refused: int
    failed: int


class Load:
    """Clients in a closed loop against one address. Everything random comes from `seed`."""

    def __init__(self, url: str, clients: int, seed: int, mix: str) -> None:
        self.url = url
        self.mix = mix
        self.clients = clients
        self.seed = seed
        self.finished = self.cancelled = self.refused = self.failed = 0
        self.gaps: list[float] = []

    async def run(self, seconds: float) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=None, limits=limits) as client:
            tasks = [
                asyncio.create_task(self.client(client, random.Random(self.seed * 1000 + number)))
                for number in range(self.clients)
            ]
            await asyncio.sleep(seconds)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def client(self, client: httpx.AsyncClient, dice: random.Random) -> None:
        while True:
            body, leaves_after = plain(dice) if self.mix == "plain" else adversarial(dice)
            try:
                await self.stream(client, body, leaves_after)
            except httpx.TransportError:
                self.failed += 1

    async def stream(self, client: httpx.AsyncClient, body: dict[str, Any], leaves_after: int | None) -> None:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                self.refused += 1
                await answer.aread()
                await asyncio.sleep(float(answer.headers.get("retry-after", "1")))
                return
            last, pieces = None, 0
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    self.finished += 1
                    return
                now = time.monotonic()
                if last is not None:
                    self.gaps.append(now - last)
                last, pieces = now, pieces + 1
                if leaves_after is not None and pieces >= leaves_after:
                    self.cancelled += 1
                    return
            self.failed += 1


BODY: dict[str, Any] = {"model": MODEL, "ignore_eos": True, "temperature": 0, "stream": True}


def plain(dice: random.Random) -> tuple[dict[str, Any], int | None]:
    """All alike: 200 in, 1,000 out, and every client stays."""
    return BODY | {"prompt": text(dice, 200), "max_tokens": 1000}, None


def adversarial(dice: random.Random) -> tuple[dict[str, Any], int | None]:
    """One request, and after how many pieces its client leaves (None: it stays)."""
    kind, body = dice.random(), dict(BODY)
    if kind < 0.60:  # short prompts that may become long: what overruns the cache
        body |= {"prompt": text(dice, dice.randint(20, 300)), "max_tokens": dice.randint(600, 1400)}
    elif kind < 0.80:  # long prompts
        body |= {"prompt": text(dice, dice.randint(800, 2000)), "max_tokens": dice.randint(50, 300)}
    elif kind < 0.90:  # two sequences of one request
        body |= {"prompt": text(dice, dice.randint(20, 300)), "max_tokens": dice.randint(200, 700), "n": 2}
    elif kind < 0.95:  # no cap: the engine's own
        body |= {"prompt": text(dice, dice.randint(20, 300))}
    else:  # more than there is
        body |= {"prompt": text(dice, 500), "max_tokens": 4000}
    return body, dice.randint(5, 400) if dice.random() < 0.15 else None


def text(dice: random.Random, size: int) -> str:
    # Unlike any other, so that no prefix is shared: each must have its own blocks.
    return "".join(dice.choices("abcdefghijklmnopqrstuvwxyz ", k=size))


def metric(url: str, name: str) -> float:
    found = re.search(rf"^{name}\{{[^}}]*\}} (\S+)$", httpx.get(f"{url}/metrics", timeout=30).text, re.M)
    return float(found[1]) if found else 0.0


def measured(how: str, engine: str, url: str, minutes: float, clients: int, seed: int, mix: str) -> Tally:
    names = ("vllm:num_preemptions_total", "vllm:generation_tokens_total")
    before, started = [metric(engine, name) for name in names], time.monotonic()
    load = Load(url, clients, seed, mix)
    asyncio.run(load.run(minutes * 60))
    seconds = time.monotonic() - started
    preempted, tokens = (metric(engine, name) - old for name, old in zip(names, before, strict=True))
    return Tally(
        how=how,
        seconds=round(seconds, 1),
        preemptions=int(preempted),
        worst_stall=round(max(load.gaps, default=0.0), 3),
        stalls_over_100ms=sum(gap > 0.1 for gap in load.gaps),
        tokens_per_second=round(tokens / seconds, 1),
        finished=load.finished,
        cancelled=load.cancelled,
        refused=load.refused,
        failed=load.failed,
    )


@contextlib.contextmanager
def vllm(python: str, blocks: int, size: list[str]) -> Iterator[str]:
    """A server with a pool of `blocks` blocks."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
        subprocess.run([python, str(ROOT / "tests/vllm/make_model.py"), f"{folder}/model", *size], check=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        process = subprocess.Popen(
            [
                *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", f"{folder}/model"),
                *("--served-model-name", MODEL, "--load-format", "dummy", "--enforce-eager"),
                *("--num-gpu-blocks-override", str(blocks), "--max-model-len", "4096"),
                *("--host", "127.0.0.1", "--port", str(port)),
            ],
            env=os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
            stdout=log,
            stderr=log,
        )
        url = f"http://127.0.0.1:{port}"
        try:
            until_up(process, url, Path(folder) / "log")
            yield url
        finally:
            process.terminate()
            process.wait(60)


def until_up(process: subprocess.Popen[Any], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"vLLM did not start:\n{log.read_text()[-4000:]}")
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(1)


@contextlib.contextmanager
def gate(engine: str) -> Iterator[tuple[str, str]]:
    """kvgate in front of it, with nothing said of its sizes: its own address and its admin server's."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "kvgate", "serve", "--upstream", engine, "--safety-fraction", "auto"),
            *("--max-wait", "3600", "--count-timeout", "120", "--drain-timeout", "1"),
            *("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    found = re.search(r"listening on (\S+?), admin on (\S+?), ", process.stdout.readline())
    try:
        if found is None:
            raise SystemExit("kvgate did not start")
        yield found[1], found[2]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        process.stdout.close()


def last_words(admin: str) -> dict[str, Any]:
    """What kvgate's correction has come to, and how late its loop ever was."""
    status = httpx.get(f"{admin}/status", timeout=30).json()
    pool = status["pools"][0]
    return {
        "usable_blocks": pool["usable_blocks"],
        "drift": pool["drift"],
        "longest_loop_lag": status["loop_lag"]["longest_seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of each load")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--blocks", type=int, default=64, help="of 128 tokens; one is the null block")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mix", choices=["adversarial", "plain"], default="adversarial")
    parser.add_argument("--only", choices=["direct", "gated"])
    parser.add_argument(
        "--model-size", default="128,2", help="hidden width and layers: a larger model's work"
    )
    parser.add_argument("--url", help="a vLLM that runs already")
    parser.add_argument(
        "--python", default=os.environ.get("KVGATE_VLLM_PYTHON", str(ROOT / ".venv-vllm/bin/python"))
    )
    given = parser.parse_args()
    running = (
        contextlib.nullcontext(given.url)
        if given.url
        else vllm(given.python, given.blocks, given.model_size.split(","))
    )
    tallies = []
    with running as engine:
        load = (given.minutes, given.clients, given.seed, given.mix)
        if given.only != "direct":
            with gate(engine) as (url, admin):
                tallies.append(measured("through kvgate", engine, url, *load))
                last = last_words(admin)
            print(json.dumps(asdict(tallies[-1]) | last), flush=True)
        if given.only != "gated":
            tallies.append(measured("direct", engine, engine, *load))
            print(json.dumps(asdict(tallies[-1])), flush=True)
    print(
        f"{'':16} preemptions  worst stall  stalls > 0.1 s  tokens/s  finished  failed   (seed {given.seed})"
    )
    for tally in tallies:
        print(
            f"{tally.how:16} {tally.preemptions:11,} {tally.worst_stall:10.2f} s "
            f"{tally.stalls_over_100ms:15,} {tally.tokens_per_second:9,.0f} "
            f"{tally.finished:9,} {tally.failed:7,}"
        )
    if len(tallies) == 2 and tallies[1].tokens_per_second:
        share = tallies[0].tokens_per_second / tallies[1].tokens_per_second
        print(f"throughput through kvgate: {share:.3f} of direct")


if __name__ == "__main__":
    main()
