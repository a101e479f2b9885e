"""What the operator may say about tenants, and what becomes of it."""

from __future__ import annotations

from typing import Any

import pytest

from kvgate.core.records import CapRules, Misuse, Tenant
from kvgate.core.tenancy import ClassRule, TenantRule, both


def test_a_ceiling_as_a_fraction_follows_the_size_of_the_pool() -> None:
    rule = TenantRule("a", ceiling_fraction=0.25, weight=2.0, priority=1)
    assert rule.tenant(1000) == Tenant("a", 2.0, 250, 1)
    assert rule.tenant(2).ceiling == 1
    assert TenantRule("b", ceiling_blocks=7).tenant(1000).ceiling == 7


def test_what_may_come_back_of_the_pool_counts_for_never_and_not_for_now() -> None:
    shrunk = TenantRule("a", ceiling_fraction=0.5).tenant(800, 900)
    assert (shrunk.ceiling, shrunk.most_ceiling, shrunk.never_above) == (400, 450, 450)
    whole, blocks = TenantRule("a", ceiling_fraction=0.5), TenantRule("b", ceiling_blocks=7)
    assert whole.tenant(900, 900) == whole.tenant(900)
    assert (blocks.tenant(800, 900).most_ceiling, blocks.tenant(800, 900).never_above) == (None, 7)
    assert Tenant("c").never_above is None
    for most in ({"ceiling": 5, "most_ceiling": 4}, {"most_ceiling": 4}):
        with pytest.raises(Misuse):
            Tenant("a", **most)


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight": 0.0},
        {"ceiling_blocks": 0},
        {"ceiling_fraction": 0.0},
        {"ceiling_fraction": 1.5},
        {"ceiling_blocks": 5, "ceiling_fraction": 0.5},
        {"max_output_cap": 0},
        {"default_output_cap": -1},
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(Misuse):
        TenantRule("a", **wrong)


@pytest.mark.parametrize("floor", [-0.1, 1.0])
def test_a_floor_is_a_share_of_the_pool(floor: float) -> None:
    with pytest.raises(Misuse):
        ClassRule(1, floor)


@pytest.mark.parametrize(
    ("everybody", "own", "expected"),
    [
        (CapRules(100, 200), CapRules(), CapRules(100, 200)),
        (CapRules(100, 200), CapRules(50, 300), CapRules(50, 200)),
        (CapRules(100, 200), CapRules(None, 20), CapRules(100, 20)),
        (CapRules(), CapRules(None, 20), CapRules(None, 20)),
        (CapRules(None, 30), CapRules(10), CapRules(10, 30)),
    ],
)
def test_a_tenant_gets_its_own_default_and_the_lower_ceiling(
    everybody: CapRules, own: CapRules, expected: CapRules
) -> None:
    assert both(everybody, own) == expected
