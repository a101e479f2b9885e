"""What a decision costs: CPU microseconds of the ledger and of the whole gate.

    python benchmarks/ledger.py [--json FILE]

CPU time of this process (not wall time, so a busy neighbour counts less), the median of 5 repeats
and their range. Each is timed beside 0 and beside 1,000 live reservations: a cost that grows with
the live is a defect, except for a refusal: its forecast reads the live once, and sorts them if they
have changed.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from kvgate.core.gate import Gate
from kvgate.core.ledger import Ledger
from kvgate.core.records import Ask, Ending, Granted, PoolFacts, Refused

REPEATS = 5
LIVE = (0, 1_000)
TARGET_US = 2.0
FACTS = PoolFacts(total_blocks=1_000_000, block_size=16, context=131_072, max_seqs=100_000)


def ledger_pair(live: int) -> Callable[[int], None]:
    ledger = Ledger(FACTS)
    for _ in range(live):
        ledger.reserve(10)

    def run(count: int) -> None:
        reserve, release = ledger.reserve, ledger.release
        for _ in range(count):
            key = reserve(10)
            assert key is not None
            release(key)

    return run


def gate_pair(live: int) -> Callable[[int], None]:
    gate = Gate(FACTS)
    for _ in range(live):
        gate.ask(Ask((100,), 100), 0.0)

    def run(count: int) -> None:
        # The request is made anew each time, as a server must.
        for _ in range(count):
            answer = gate.ask(Ask((1_000,), 500), 1.0)
            assert isinstance(answer, Granted)
            gate.ended(answer.key, Ending.COMPLETED, 2.0)

    return run


def gate_refusal(live: int) -> Callable[[int], None]:
    gate = Gate(
        PoolFacts(total_blocks=max(1, live) * 13, block_size=16, context=131_072, safety_fraction=1.0)
    )
    for _ in range(max(1, live)):
        assert isinstance(gate.ask(Ask((100,), 109), 0.0), Granted)

    def run(count: int) -> None:
        for _ in range(count):
            assert isinstance(gate.ask(Ask((100,), 50, draw=0.5), 1.0), Refused)

    return run


CASES: dict[str, Callable[[int], Callable[[int], None]]] = {
    "ledger: reserve + release": ledger_pair,
    "gate: ask + ended": gate_pair,
    "gate: ask, refused": gate_refusal,
}


def measure(run: Callable[[int], None], count: int) -> list[float]:
    """CPU microseconds a call, once for each repeat."""
    run(count // 10)
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
    parser.add_argument("--count", type=int, default=100_000, help="calls in each repeat")
    options = parser.parse_args()
    rows = []
    print(
        f"Python {platform.python_version()}, up to {options.count} calls x {REPEATS} repeats, CPU us a call"
    )
    print(f"{'case':<28}{'live':>6}{'median':>9}{'min':>8}{'max':>8}")
    for case, build in CASES.items():
        for live in LIVE:
            # A refusal costs more, and needs fewer calls for the same certainty.
            count = options.count // (10 if "refused" in case else 1)
            figures = measure(build(live), count)
            row = {
                "case": case,
                "live": live,
                "median_us": round(statistics.median(figures), 3),
                "min_us": round(min(figures), 3),
                "max_us": round(max(figures), 3),
            }
            rows.append(row)
            print(
                f"{case:<28}{live:>6}{row['median_us']:>9.2f}{row['min_us']:>8.2f}{row['max_us']:>8.2f}",
                flush=True,
            )
    worst = max(float(str(row["median_us"])) for row in rows if str(row["case"]).startswith("ledger"))
    met = worst < TARGET_US
    print(f"target: reserve + release under {TARGET_US} us: {'met' if met else 'MISSED'} ({worst:.2f} us)")
    if options.json is not None:
        result = {"python": platform.python_version(), "target_us": TARGET_US, "met": met, "rows": rows}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
