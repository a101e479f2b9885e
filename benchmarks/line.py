"""What the line costs while thousands wait: CPU microseconds of each of its operations.

    python benchmarks/line.py [--json FILE] [--waiting N]

CPU time of this process, the median of 5 repeats and their range, with one tenant and with many. The
last two rows are whole decisions of the gate, its forecast included. The target is for the line.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from kvgate.core.accounts import Waiter
from kvgate.core.gate import Gate
from kvgate.core.line import Line
from kvgate.core.records import Ask, Ending, Granted, PoolFacts, Price, Queued, Refused, Tenant

REPEATS = 5
TARGET_US = 20.0
TENANTS = (1, 1_000)
LIVE = 200
Run = Callable[[int], None]


def asks(tenants: int, max_wait: float) -> list[Ask]:
    rng = random.Random(1)
    return [
        Ask(
            (100,),
            rng.choice((50, 500, 2_000)),
            max_wait=max_wait,
            tenant=Tenant(f"t{n}", rng.choice((1, 2))),
        )
        for n in range(tenants)
    ]


def waiter(key: int, ask: Ask) -> Waiter:
    return Waiter(key, ask, Price(10, 1, 100), 10, 1, float(key), 1e9 + key, float(key))


def filled(waiting: int, tenants: int) -> tuple[Line, list[Ask]]:
    line, wanted = Line(10 * waiting), asks(tenants, 60.0)
    for key in range(waiting):
        line.join(waiter(key, wanted[key % tenants]))
    return line, wanted


def join_and_leave(waiting: int, tenants: int) -> Run:
    line, wanted = filled(waiting, tenants)
    keys = itertools.count(waiting)

    def run(count: int) -> None:
        for key in itertools.islice(keys, count):
            line.join(waiter(key, wanted[key % tenants]))
            line.leave(key)

    return run


def serve_the_head(waiting: int, tenants: int) -> Run:
    """The head goes, and another comes: the line stays as long as it is."""
    line, wanted = filled(waiting, tenants)
    keys = itertools.count(waiting)

    def run(count: int) -> None:
        for key in itertools.islice(keys, count):
            head = line.shares.head(1_000_000)
            assert head is not None
            line.leave(head.key)
            line.shares.let_go(line.shares.hold(head.ask.tenant, 10, 100.0), 10, 0.0)
            line.join(waiter(key, wanted[key % tenants]))

    return run


def room_for_one_more(waiting: int, tenants: int) -> Run:
    line, wanted = filled(waiting, tenants)

    def run(count: int) -> None:
        for n in range(count):
            assert line.has_room_for(wanted[n % tenants], 10)
            line.next_deadline()

    return run


def full_gate(waiting: int, tenants: int) -> tuple[Gate, list[int], list[Ask]]:
    gate = Gate(PoolFacts(LIVE * 38, 16, 131_072, safety_fraction=1.0), line_limit=10 * waiting)
    live = []
    while isinstance(answer := gate.ask(Ask((100,), 500), 0.0), Granted):
        live.append(answer.key)
    wanted = asks(tenants, 1e6)
    for n in range(waiting):
        assert isinstance(gate.ask(wanted[n % tenants], n * 1e-6), Queued)
    return gate, live, wanted


def end_and_let_in(waiting: int, tenants: int) -> Run:
    gate, live, wanted = full_gate(waiting, tenants)
    moments = itertools.count(1)

    def run(count: int) -> None:
        for n in itertools.islice(moments, count):
            now = n * 0.01
            answers = gate.ended(live.pop(0), Ending.COMPLETED, now)
            live.extend(answer.key for answer in answers if isinstance(answer, Granted) and answer.key)
            for _ in answers:
                assert isinstance(gate.ask(wanted[n % tenants], now), Queued)

    return run


def refuse(waiting: int, tenants: int) -> Run:
    gate, _, _ = full_gate(waiting, tenants)
    hurried = asks(tenants, 0.0)

    def run(count: int) -> None:
        for n in range(count):
            assert isinstance(gate.ask(hurried[n % tenants], 1.0), Refused)

    return run


CASES: dict[str, Callable[[int, int], Run]] = {
    "line: join + leave": join_and_leave,
    "line: head goes, one joins": serve_the_head,
    "line: room and deadline": room_for_one_more,
    "gate: ended, next in, one waits": end_and_let_in,
    "gate: refused beside the line": refuse,
}


def measure(run: Run, count: int) -> list[float]:
    """CPU microseconds a call, once for each repeat."""
    run(max(1, count // 10))
    figures = []
    gc.disable()
    for _ in range(REPEATS):
        gc.collect()
        began = time.process_time()
        run(count)
        figures.append((time.process_time() - began) / count * 1e6)
    gc.enable()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--waiting", type=int, default=10_000, help="how many wait")
    parser.add_argument("--count", type=int, default=5_000, help="calls in each repeat")
    options = parser.parse_args()
    rows = []
    print(
        f"Python {platform.python_version()}, {options.waiting} waiting, {options.count} calls x {REPEATS} "
        "repeats, CPU us a call"
    )
    print(f"{'case':<34}{'tenants':>8}{'median':>9}{'min':>8}{'max':>8}")
    for case, build in CASES.items():
        for tenants in TENANTS:
            count = options.count // (10 if case.startswith("gate") else 1)
            figures = [round(f, 3) for f in measure(build(options.waiting, tenants), count)]
            middle = statistics.median(figures)
            rows.append(
                {"case": case, "tenants": tenants, "median_us": middle, "min_us": min(figures),
                 "max_us": max(figures)}
            )  # fmt: skip
            print(f"{case:<34}{tenants:>8}{middle:>9.2f}{min(figures):>8.2f}{max(figures):>8.2f}", flush=True)
    worst = max(float(str(row["median_us"])) for row in rows if str(row["case"]).startswith("line"))
    met = worst < TARGET_US
    verdict = "met" if met else "MISSED"
    print(f"target: every operation of the line under {TARGET_US:g} us: {verdict} ({worst:.2f} us)")
    if options.json is not None:
        result = {"python": platform.python_version(), "target_us": TARGET_US, "met": met, "rows": rows}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
