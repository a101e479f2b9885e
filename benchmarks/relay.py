"""What the relay costs: CPU of the gateway per request and per streamed chunk, beside its peers.

    python benchmarks/relay.py [--quick] [--repeats 5] [--only kvgate,nginx] [--json FILE]
    python benchmarks/relay.py install          the peers, into .cache/peers (`make peers`)
    python benchmarks/relay.py conformance      `kvgate conformance` on every peer, to .cache/conformance

Everything runs on this machine in one go. The gateway has one core to itself; a scripted engine and
this client share another. Gateways are measured in turn, each started afresh for every repeat, so
that a slow minute of the machine meets all of them. `relaybench/measure.py` says what is counted.
kvgate does its full work: it parses and prices each body, reserves, writes the cap into the body,
reads the usage and releases. `kvgate` gets chats, always the same one, so that the engine is asked once
and its count is remembered: what counting costs is benchmarks/counting.py's. `kvgate-ids` gets prompts of
token ids, which need no count. Both are compiled (tools/compile.py); `python` and `python-ids` are the
same, not compiled. The others only forward.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop
from relaybench import conformance, peers, report
from relaybench.client import Broken
from relaybench.gateways import Gateway, all_gateways
from relaybench.measure import Plan, one_round
from relaybench.processes import cores, free_port, running

ENGINE = Path(__file__).with_name("relaybench") / "engine.py"


async def bench(gateways: list[Gateway], plan: Plan, repeats: int) -> dict[str, Any]:
    near, _ = cores()
    os.sched_setaffinity(0, near)
    rounds: dict[str, list[dict[str, float]]] = {gateway.name: [] for gateway in gateways}
    broken: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        port = free_port()
        with running([sys.executable, str(ENGINE), "--port", str(port)], near, log=Path(name, "engine")):
            await asyncio.sleep(0.5)
            for repeat in range(repeats):
                for gateway in gateways:
                    if gateway.command is None or gateway.name in broken:
                        continue
                    began = time.monotonic()
                    try:
                        figures = await one_round(gateway, port, plan)
                    except Broken as failure:
                        broken[gateway.name] = str(failure)
                        said = f"failed: {failure}"
                    else:
                        rounds[gateway.name].append(figures)
                        said = (
                            f"{figures['request_us']:.1f} us a request, {figures['chunk_us']:.1f} us a chunk"
                        )
                    took = time.monotonic() - began
                    print(
                        f"{repeat + 1}/{repeats} {gateway.name}: {said} ({took:.0f} s)",
                        file=sys.stderr,
                        flush=True,
                    )
    results: dict[str, Any] = {}
    for gateway in gateways:
        shown: dict[str, Any] = {"version": gateway.version}
        if gateway.command is None:
            shown |= {"state": "absent", "why": gateway.absent}
        elif gateway.name in broken:
            shown |= {"state": "failed", "why": broken[gateway.name]}
        else:
            shown |= {"state": "measured", "figures": report.summary(rounds[gateway.name])}
        results[gateway.name] = shown
    return results


def chosen(names: str | None) -> list[Gateway]:
    found = all_gateways()
    if names is None:
        return found
    wanted = names.split(",")
    unknown = set(wanted) - {gateway.name for gateway in found}
    if unknown:
        raise SystemExit(
            f"no such gateway: {', '.join(sorted(unknown))}; there are "
            f"{', '.join(gateway.name for gateway in found)}"
        )
    return [gateway for gateway in found if gateway.name in wanted]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("measure", "install", "conformance"), default="measure")
    parser.add_argument("--quick", action="store_true", help="one short repeat without LiteLLM")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measured window")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--only", metavar="NAMES", help="gateways, with commas between")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there too")
    parser.add_argument("--cases", metavar="PATTERN", help="conformance: only these cases")
    parser.add_argument("--out", metavar="DIR", type=Path, default=peers.ROOT / ".cache" / "conformance")
    arguments = parser.parse_args()
    if arguments.what == "install":
        peers.install_all()
        return
    gateways = chosen(arguments.only)
    if arguments.what == "conformance":
        conformance.run_all(gateways, arguments.out, arguments.cases)
        return
    repeats, seconds = (1, 1.0) if arguments.quick else (arguments.repeats, arguments.seconds)
    if arguments.quick and arguments.only is None:
        gateways = [gateway for gateway in gateways if gateway.name != "litellm"]
    plan = Plan(streams=arguments.streams, seconds=seconds)
    conditions = report.conditions(plan, repeats)
    try:
        results = uvloop.run(bench(gateways, plan, repeats))
    except KeyboardInterrupt:
        raise SystemExit("interrupted; every process that was started has been ended") from None
    print(report.table(gateways, results, plan.streams))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**conditions, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
