"""The command line of a chaos run. Exit status 1 when a law was broken."""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import uvloop

from kvgate.lab.chaos.run import Chaos, Result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvgate.lab.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, help="default: a fresh one, which is printed")
    parser.add_argument("--streams", type=int, default=300, help="clients at work at any time (default 300)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, too")
    arguments = parser.parse_args()
    seed = random.randrange(1 << 32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    chaos = Chaos(seed, arguments.seconds, arguments.streams, _progress)
    result = uvloop.run(chaos.run())
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result.as_json(), indent=1) + "\n")
    print(report(result))
    sys.exit(bool(result.broken))


def report(result: Result) -> str:
    """The result in words."""
    shown, loop = result.as_json(), result.loop
    lines = [
        f"seed {result.seed}: {result.seconds:g} s, {result.audits} audits, {len(result.broken)} complaints",
        f"requests {sum(result.endings.values())}, admitted {result.counters['admissions']}, "
        f"engine killed {result.kills} times, capacity changed {result.resizes} times",
        f"reservations: median {shown['live']['median']:g}, most {shown['live']['max']}; "
        f"waiting: most {shown['waiting']['max']}; all 0 {result.empty_after:.1f} s after the end",
        f"gateway: {loop['cpu_seconds'] / result.seconds:.0%} of a core, "
        f"{shown['resident']['max'] / 2**20:.0f} MiB at most, "
        f"{shown['resident']['last'] / 2**20:.0f} at the end",
        f"event loop: longest lag {loop['longest_seconds'] * 1000:.1f} ms, {loop['over_20ms']} of "
        f"{loop['samples']} samples 20 ms or more; "
        f"of these {loop['causes']}; at most {loop['longest_own_seconds'] * 1000:.1f} ms of one was our own; "
        f"longest collection {loop['gc_longest_seconds'] * 1000:.1f} ms, "
        f"longest audit {result.audit_longest * 1000:.1f} ms",
    ]
    for stall in loop["stalls"]:
        where = next((s["where"] for s in loop["seen"] if 0 <= stall["at"] - s["at"] <= stall["seconds"]), "")
        lines.append(
            f"  stall at {stall['at']:7.2f} s: {stall['seconds'] * 1000:5.1f} ms, {stall['cause']}"
            f"{' in ' + stall['step'] if stall['step'] else ''} "
            f"(processor {stall['cpu_seconds'] * 1000:.1f} ms, "
            f"collecting {stall['gc_seconds'] * 1000:.1f} ms) {where}"
        )
    lines += [f"  {count:6} {name}" for name, count in sorted(result.endings.items())]
    lines += [f"BROKEN {text}" for text in result.broken[:50]]
    return "\n".join(lines)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, end="\r" if sys.stderr.isatty() else "\n", flush=True)


if __name__ == "__main__":
    main()
