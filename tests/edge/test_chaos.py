"""A minute in which everything goes wrong at once; ten of them by `python -m kvgate.lab.chaos`."""

from __future__ import annotations

import copy
import random
from random import Random
from typing import Any

import pytest

from kvgate.lab.chaos.__main__ import report
from kvgate.lab.chaos.laws import GAUGES, Laws
from kvgate.lab.chaos.plan import FAULTS, LEAVES, ODD, draw
from kvgate.lab.chaos.run import Chaos

SECONDS = 45.0
STREAMS = 300


def page(**changes: Any) -> dict[str, Any]:
    """A page that breaks no law: 5 reservations, one of them lingering and one not sent."""
    pool = {"reserved_blocks": 50, "usable_blocks": 90, "total_blocks": 100, "live": 5, "lingering": 1}
    pool |= {"waiting": 2, "reserved_seqs": 5}
    shown = {
        "pool": pool,
        "gauges": {name: float(pool[key]) for name, key in GAUGES.items()},
        "states": {"WAITING": 2, "CONNECTING": 1, "SENDING": 1, "STREAMING": 2},
        "counters": {"double_releases": 0, "admissions": 7},
        "owned": 4,
        "sent": 3,
        "clients": 8,
        "pooled": 6,
        "sockets": 6,
    }
    shown = copy.deepcopy(shown)
    for place, value in changes.items():
        *path, name = place.split("__")
        into: Any = shown
        for part in path:
            into = into[part]
        into[name] = value
    return shown


def complaints(shown: dict[str, Any]) -> list[str]:
    laws = Laws()
    laws.page(shown, "now")
    return laws.broken


def test_a_page_in_order_breaks_no_law() -> None:
    assert complaints(page()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"owned": 3},  # a reservation without an owner
        {"owned": 5},  # one with two
        {"gauges__reserved_blocks": 49.0},
        {"gauges__live_reservations": 4.0},
        {"sockets": 2},  # a request was sent and has no connection
        {"sockets": 9},  # a connection that nobody knows
        {"states__WAITING": 1},  # waits for nobody
        {"pool__reserved_blocks": 91, "gauges__reserved_blocks": 91.0},
        {"counters__double_releases": 1},
    ],
    ids=str,
)
def test_every_planted_fault_of_the_books_is_found(change: dict[str, Any]) -> None:
    assert complaints(page(**change)) != []


def test_more_than_usable_is_right_only_while_it_falls_after_a_shrink() -> None:
    def at(reserved: int) -> dict[str, Any]:
        return page(pool__reserved_blocks=reserved, gauges__reserved_blocks=float(reserved))

    laws = Laws()
    laws.shrunk(at(120))
    for reserved in (120, 110, 95, 80):
        laws.page(at(reserved), "while it drains")
    assert laws.broken == []
    laws.page(at(95), "afterwards")
    assert len(laws.broken) == 1


def test_an_engine_that_is_busier_than_what_is_reserved_is_found() -> None:
    laws = Laws()
    laws.engine(page(), {"open": 4, "busy": 6}, page(counters__admissions=8), "now")
    assert laws.broken == []
    laws.engine(page(), {"open": 4, "busy": 6}, page(), "now")
    assert len(laws.broken) == 1


@pytest.mark.parametrize("place", ["pool__live", "pool__lingering", "clients", "sockets"])
def test_whatever_is_left_at_the_end_is_found(place: str) -> None:
    zero = {f"pool__{name}": 0 for name in ("reserved_blocks", "live", "lingering", "waiting")}
    zero |= {"gauges__live_reservations": 0.0, "gauges__reserved_blocks": 0.0}
    zero |= {"clients": 0, "sockets": 0, "pooled": 0}
    laws = Laws()
    laws.empty(page(**zero), {"open": 0, "busy": 0})
    assert laws.broken == []
    laws.empty(page(**(zero | {place: 1})), {"open": 0, "busy": 0})
    assert len(laws.broken) == 1


def test_plans_follow_from_their_seed_and_leave_nothing_out() -> None:
    def drawn(seed: int) -> list[Any]:
        rng = Random(seed)
        return [draw(rng) for _ in range(3000)]

    plans = drawn(1)
    assert plans == drawn(1) != drawn(2)
    assert {p.fault for p in plans} == {"", *FAULTS}
    assert {p.leave for p in plans} == {"never", *LEAVES}
    assert {p.odd for p in plans} == {"", *ODD}
    assert sum(p.is_calm for p in plans) > len(plans) / 3


@pytest.mark.slow
async def test_a_minute_of_chaos_breaks_no_law_and_leaves_nothing_behind() -> None:
    seed = random.randrange(1 << 32)
    print(f"python -m kvgate.lab.chaos --seconds {SECONDS:g} --streams {STREAMS} --seed {seed}")
    result = await Chaos(seed, SECONDS, STREAMS, print).run()
    text = report(result)
    assert result.broken == [], text
    # Enough of it happened for that to mean something.
    assert result.audits > SECONDS / 2, text
    assert max(result.live) > 100, text
    assert result.kills > 0, text
    assert result.resizes > 3, text
    assert max(result.waiting) > 0, text
