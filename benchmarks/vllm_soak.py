"""Adversarial load on a real vLLM, directly and through kvgate with a safety fraction that finds itself.

    python benchmarks/vllm_soak.py --minutes 10        needs vLLM in .venv-vllm (make test-vllm)
    python benchmarks/vllm_soak.py --minutes 3 --model-config-kind sliding --blocks 128

One tiny model with random weights and a small pool, so that its cache and not its arithmetic is what
runs out; both ways with the same engine, options and requests. Clients come back at once: many of
them, short prompts with large caps, long prompts, two choices, caps that nobody set, and some that
leave in the middle. Printed: preemptions, the worst gap between two tokens of a running sequence,
tokens a second, how full kvgate kept the pool while somebody waited, and whether the engine ever
used more than was reserved.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from dataclasses import asdict
from typing import Any

import httpx
from vllmsoak.books import Books, compared
from vllmsoak.load import Load, Tally, measured
from vllmsoak.servers import ROOT, Engine, Gateway, Model, gate, vllm

# A page costs the engine's API server some milliseconds of the cores that all share here.
LOOK_SECONDS = 1.0


def last_words(gateway: Gateway, books: Books) -> dict[str, Any]:
    """What kvgate's correction has come to, how late its loop ever was, and how the books compare."""
    status = httpx.get(f"{gateway.admin}/status", timeout=30).json()
    pool = status["pools"][0]
    return {
        "usable_blocks": pool["usable_blocks"],
        "drift": pool["drift"],
        "longest_loop_lag": status["loop_lag"]["longest_seconds"],
        "cpu_seconds": gateway.cpu_seconds(),
        "samples": len(books.samples),
        "samples_of_more_use_than_reserved": len(books.over),
        "reserved_while_waiting": round(books.fill, 3),
        "used_mean": round(books.mean_used, 3),
        "used_most": round(books.most_used, 3),
    }


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of each load")
    parser.add_argument(
        "--warm-up", type=float, default=60.0, help="seconds of each load before its throughput counts"
    )
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--blocks", type=int, default=128, help="of 128 tokens; one is the null block")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mix", choices=["adversarial", "plain"], default="adversarial")
    parser.add_argument("--only", choices=["direct", "gated"])
    parser.add_argument("--model-config-kind", choices=["dense", "sliding", "linear"], default="dense")
    parser.add_argument(
        "--model-size", default="512,6", help="width and layers (0: the kind's own): a larger model's work"
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=128,
        help="vLLM's option: tokens of a step, so how much of a prompt may come between two tokens of\n"
        "those who decode (vLLM's own default: 2048)",
    )
    parser.add_argument("--safety-fraction", default="auto", help="kvgate's option")
    parser.add_argument("--url", help="a vLLM that runs already, with one KV group")
    parser.add_argument(
        "--python", default=os.environ.get("KVGATE_VLLM_PYTHON", str(ROOT / ".venv-vllm/bin/python"))
    )
    return parser


def main() -> None:
    given = options().parse_args()
    hidden, layers = map(int, given.model_size.split(","))
    model = Model(given.model_config_kind, hidden, layers, given.blocks, given.max_num_batched_tokens)
    running: contextlib.AbstractContextManager[Engine]
    if given.url:
        running = contextlib.nullcontext(Engine(given.url, Model(), None))
    else:
        running = vllm(given.python, model)
    tallies = []
    lengths = (given.minutes * 60, given.warm_up)

    def load(url: str) -> Load:
        return Load(url, engine.url, given.clients, given.seed, given.mix)

    with running as engine:
        if given.only != "direct":
            with gate(engine, ["--safety-fraction", given.safety_fraction]) as gateway:
                with compared(engine.url, gateway.admin, LOOK_SECONDS) as books:
                    tallies.append(measured("through kvgate", engine.url, load(gateway.url), *lengths))
                last = last_words(gateway, books)
            print(json.dumps(asdict(tallies[-1]) | last), flush=True)
        if given.only != "gated":
            with compared(engine.url, None, LOOK_SECONDS) as books:
                tallies.append(measured("direct", engine.url, load(engine.url), *lengths))
            used = {"used_mean": round(books.mean_used, 3), "used_most": round(books.most_used, 3)}
            print(json.dumps(asdict(tallies[-1]) | used), flush=True)
    report(tallies, given.seed)


def report(tallies: list[Tally], seed: int) -> None:
    print(f"{'':16} preemptions  worst stall  stalls > 0.1 s  tokens/s  finished  failed   (seed {seed})")
    for tally in tallies:
        print(
            f"{tally.how:16} {tally.preemptions:11,} {tally.worst_stall:10.2f} s "
            f"{tally.stalls_over_100ms:15,} {tally.tokens_per_second:9,.0f} "
            f"{tally.finished:9,} {tally.failed:7,}"
        )
        if tally.deaf_seconds:
            print(
                f"{'':16} without {tally.deaf_seconds} s in which the engine answered nobody: the worst "
                f"{tally.worst_stall_while_well:.2f} s, {tally.stalls_while_well:,} over 0.1 s"
            )
    if len(tallies) == 2 and tallies[1].tokens_per_second:
        share = tallies[0].tokens_per_second / tallies[1].tokens_per_second
        print(f"throughput through kvgate: {share:.3f} of direct")


if __name__ == "__main__":
    main()
