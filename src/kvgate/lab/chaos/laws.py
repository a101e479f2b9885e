"""The laws that hold at every second of a chaos run, stated over the pages of `host.py` and the
engine's own books. Pure: pages in, complaints out.

At one instant in the gateway's process:

1. Every reservation has exactly one owner: `live == owned + lingering`. An exchange that has not
   ended owns its own; one that was cut off leaves it to the abort grace.
2. The gauges that a scrape would show are the ledger's.
3. Every reservation whose request was sent has a socket of its own, and there are no sockets but
   those, idle ones, counting ones and ones being made:
   `live - lingering - unsent <= sockets <= pooled + being made`. Reservations that linger have none
   (the socket is what was cut), nor those whose connection is not made yet.
4. `reserved <= usable`, except from a shrink until the excess has drained; while it lasts, what is
   reserved only falls.
5. No release came twice.

Between two pages (the engine is another process, and is asked between them):

6. The engine never generates for more requests than hold a reservation:
   `busy at the engine <= live before + admitted since`.
"""

from __future__ import annotations

from typing import Any

GAUGES = {
    "reserved_blocks": "reserved_blocks",
    "usable_blocks": "usable_blocks",
    "total_blocks": "total_blocks",
    "live_reservations": "live",
    "waiting_requests": "waiting",
    "reserved_sequences": "reserved_seqs",
}


class Laws:
    """Judges pages in the order in which they were made."""

    def __init__(self) -> None:
        self.broken: list[str] = []
        self.over: int | None = None  # reserved beyond usable since a shrink: the latest figure

    def page(self, page: dict[str, Any], when: str) -> None:
        """Judge one instant."""
        pool, states = page["pool"], page["states"]
        live, lingering = pool["live"], pool["lingering"]
        self._law(live == page["owned"] + lingering, when, f"{live=} is not {page['owned']=} + {lingering=}")
        shown = {name: int(page["gauges"][name]) for name in GAUGES}
        kept = {name: pool[key] for name, key in GAUGES.items()}
        self._law(shown == kept, when, f"the gauges show {shown}, the ledger has {kept}")
        self._law(pool["waiting"] == states.get("WAITING", 0), when, f"{pool['waiting']} wait, {states}")
        unsent = page["owned"] - page["sent"]
        sockets, pooled = page["sockets"], page["pooled"]
        text = f"{live=} - {lingering=} - {unsent=} against {sockets=} of the kernel"
        self._law(live - lingering - unsent <= sockets, when, text)
        # One more for the probe of the engine's health.
        being_made = states.get("CONNECTING", 0) + states.get("COUNTING", 0) + 1
        self._law(sockets <= pooled + being_made, when, f"{sockets=} of the kernel, {pooled=}, {being_made=}")
        reserved, usable = pool["reserved_blocks"], pool["usable_blocks"]
        if reserved > usable:
            allowed = self.over is not None and reserved <= self.over
            self._law(allowed, when, f"{reserved=} of {usable=} and no shrink explains it")
            self.over = reserved
        else:
            self.over = None
        doubles = page["counters"]["double_releases"]
        self._law(doubles == 0, when, f"{doubles} releases came twice")

    def shrunk(self, page: dict[str, Any]) -> None:
        """The pool has just been resized; `page` is of that instant."""
        self.over = page["pool"]["reserved_blocks"]

    def engine(self, before: dict[str, Any], books: dict[str, Any], after: dict[str, Any], when: str) -> None:
        """Judge the engine's books, read between two pages."""
        admitted = after["counters"]["admissions"] - before["counters"]["admissions"]
        most = before["pool"]["live"] + admitted
        self._law(books["open"] <= books["busy"] <= most, when, f"{books} at the engine, {most} reserved")

    def empty(self, page: dict[str, Any], books: dict[str, Any]) -> None:
        """Judge the end: nothing is held, anywhere."""
        pool = page["pool"]
        left = {name: pool[name] for name in ("reserved_blocks", "live", "lingering", "waiting")}
        left |= {
            f"gauge {name}": int(page["gauges"][name]) for name in ("live_reservations", "reserved_blocks")
        }
        left |= {"clients": page["clients"], "sockets": page["sockets"], "pooled": page["pooled"]}
        left |= {f"{name} at the engine": books[name] for name in ("open", "busy")}
        self._law(not any(left.values()), "at the end", f"left over: {left}")

    def _law(self, holds: bool, when: str, text: str) -> None:
        if not holds:
            self.broken.append(f"{when}: {text}")
