"""What each tenant was answered, and what it holds: by names of which there are never too many.

Promises: counting is two look-ups and an addition of plain integers; a configured tenant is there
from the start, at 0; what clients send adds a bounded number of series (`edge.tenants.Labels`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvgate.core.records import Ending
from kvgate.edge.tenants import Labels


class TenantFigures:
    """Counted on the gateway's loop, shown in the thread of a scrape. `configured`: names of tenants."""

    def __init__(self, configured: Iterable[str] = ()) -> None:
        self._configured = frozenset(configured)
        self._labels = Labels(self._configured)
        self._requests: dict[tuple[str, str], int] = {}

    def know(self, configured: Iterable[str]) -> None:
        """These are configured now; those that were before keep what was counted for them."""
        names = frozenset(configured)
        if names != self._configured:
            self._configured = names
            self._labels.know(names)

    def count(self, tenant: str, outcome: str) -> None:
        """A priced request of this tenant is over."""
        key = self._labels.of(tenant), outcome
        counted = self._requests
        counted[key] = counted.get(key, 0) + 1

    def shown(self, pools: list[dict[str, Any]]) -> Iterator[Metric]:
        """Both figures of all tenants; `pools` as in the snapshot."""
        requests = CounterMetricFamily(
            "kvgate_tenant_requests",
            "Priced requests that are over, by tenant and by how they ended",
            labels=["tenant", "outcome"],
        )
        completed = {(name, Ending.COMPLETED.value): 0 for name in sorted(self._configured)}
        for key, number in (completed | self._requests).items():
            requests.add_metric(list(key), number)
        yield requests
        held = Counter(dict.fromkeys(sorted(self._configured), 0))
        for pool in pools:
            for name, blocks in pool.get("held_by", {}).items():
                held[self._labels.of(name)] += blocks
        reserved = GaugeMetricFamily(
            "kvgate_tenant_reserved_blocks", "KV blocks that a tenant's requests hold", labels=["tenant"]
        )
        for name, blocks in held.items():
            reserved.add_metric([name], blocks)
        yield reserved
