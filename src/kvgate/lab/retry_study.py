"""Which way of refusing works: constant moments, the libraries' own backoff, no retry, or forecast slots.

    python -m kvgate.lab.retry_study                    made-up lengths
    python -m kvgate.lab.retry_study --traces DIR       every DIR/*.csv.gz with lengths

Prints, for steady overload and for bursts: the share of requests that never got in, attempts for each
that did, the most retries in any 100 ms, the 95th percentile of the wait, and how full the pool was;
then how far the stated moment was from the first at which the request would have fitted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from kvgate.core.records import Refused
from kvgate.lab.retry_traffic import BURSTS, STEADY, Row, Scene, made_up, read, wishes
from kvgate.lab.retry_world import Figures, Rule, World, quantile

POOL_TOKENS = 120_000
WAITS = (0.0, 2.0, 5.0, 10.0, 30.0)


def _constant(seconds: float) -> Rule:
    return Rule(f"constant {seconds:g} s", lambda refused, tries, rng: seconds)


def _backoff(refused: Refused, tries: int, rng: Random) -> float:
    """What OpenAI's and Anthropic's libraries do without a header (their source, 2025 and 2026)."""
    return float(min(0.5 * 2 ** (tries - 1), 8.0) * (1 - 0.25 * rng.random()))


def _slot(refused: Refused, tries: int, rng: Random) -> float | None:
    return refused.retry_after


def ours(max_wait: float) -> Rule:
    return Rule(f"kvgate, max-wait {max_wait:g}", _slot, max_wait, knows=True)


RULES: tuple[Rule, ...] = (
    Rule("no retry", lambda refused, tries, rng: None),
    Rule("libraries' backoff", _backoff),
    _constant(1.0),
    _constant(20.0),
    *(ours(wait) for wait in WAITS),
)


def study(
    rows: Sequence[Row], scene: Scene, rule: Rule, *, seconds: float, cap: int | None, seed: int,
    pool_blocks: int,
) -> Figures:  # fmt: skip
    """One rule over one scene. The first sixth of the time is warm-up, and not counted."""
    arriving = wishes(rows, scene, pool_blocks, seconds, cap, Random(seed))
    return World(rule, pool_blocks, seed + 1, warm_up=seconds / 6).run(arriving)


def forecast_errors(figures: Figures) -> dict[str, tuple[float, float]]:
    """(median, 90th percentile) of |stated - actual| in seconds, for what could have been stated."""
    kinds = {
        "moment told": [abs(stated - actual) for stated, _, actual in figures.errors],
        "forecast behind it": [abs(expected - actual) for _, expected, actual in figures.errors],
        **{
            f"constant {c:g} s": [abs(c - actual) for _, _, actual in figures.errors]
            for c in (1.0, 20.0, 60.0)
        },
    }
    return {name: (quantile(e, 0.5), quantile(e, 0.9)) for name, e in kinds.items()}


def as_dict(figures: Figures) -> dict[str, Any]:
    return {
        "failed_share": round(figures.failed_share, 4),
        "attempts_per_success": round(figures.attempts_per_success, 3),
        "peak_retries_per_100ms": figures.peak,
        "wait_p50": round(figures.wait_quantile(0.5), 3),
        "wait_p95": round(figures.wait_quantile(0.95), 3),
        "utilisation": round(figures.utilisation, 4),
        "forecast_errors": {k: [round(x, 3) for x in v] for k, v in forecast_errors(figures).items()},
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvgate.lab.retry_study", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder with traces (*.csv.gz)")
    parser.add_argument("--only", metavar="TEXT", help="only traces whose name holds TEXT")
    parser.add_argument("--seconds", type=float, default=1200.0, help="simulated, for each rule and scene")
    parser.add_argument("--cap", type=int, default=1024, help="every client's output cap; 0: fitted to it")
    parser.add_argument("--pool", type=int, default=POOL_TOKENS, help="tokens of the pool")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    lengths = {"made up": made_up(Random(options.seed))}
    if options.traces is not None:
        found = sorted(options.traces.glob("*.csv.gz"))
        lengths = {p.name.removesuffix(".csv.gz"): read(p) for p in found if (options.only or "") in p.name}
        if not lengths:
            parser.error(f"no trace in {options.traces}")
    print(f"seed {options.seed}, pool {options.pool} tokens, cap {options.cap or 'fitted'}", flush=True)
    results: dict[str, Any] = {}
    for name, rows in lengths.items():
        for scene in (STEADY, BURSTS):
            print(f"\n{name}, {scene.name}\n{'':22} failed  attempts  peak/100ms  p50 wait  p95 wait  full")
            for rule in RULES:
                figures = study(rows, scene, rule, seconds=options.seconds, cap=options.cap or None,
                                seed=options.seed, pool_blocks=options.pool // 16)  # fmt: skip
                results.setdefault(name, {}).setdefault(scene.name, {})[rule.name] = as_dict(figures)
                print(
                    f"{rule.name:22} {figures.failed_share:6.1%} {figures.attempts_per_success:9.2f} "
                    f"{figures.peak:11} {figures.wait_quantile(0.5):9.1f} "
                    f"{figures.wait_quantile(0.95):9.1f} {figures.utilisation:5.0%}",
                    flush=True,
                )
                if rule.knows and rule.max_wait == 0.0:
                    shown = forecast_errors(figures)
            print(
                "error, median and p90: " + "; ".join(f"{k} {a:.1f} {b:.1f}" for k, (a, b) in shown.items())
            )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
