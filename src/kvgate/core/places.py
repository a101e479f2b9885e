"""Refused clients that were told when to come back, and the place that each of them keeps.

A client that comes back stands where it stood when it first asked. One that has come back before and
was passed over often enough has room kept for it until shortly after its moment: newcomers must leave
as many blocks as it needs. Room is kept for one client at a time, and never for one that may have
given up (common client libraries try three times), so what absent clients can cost is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

from kvgate.core.records import Seconds

# A client may come this much after its moment and still keeps its place.
GRACE: Seconds = 2.0
# OpenAI's and Anthropic's libraries try again twice by default: who was refused then is gone.
TRIES_MAX = 2
# Places remembered at once; the oldest promise goes first.
PLACES_MAX = 4096


@dataclass(slots=True)
class Place:
    """When a client first asked, what it needs, when it will be back, how often it was passed."""

    since: Seconds
    blocks: int
    seqs: int
    due: Seconds
    tries: int = 0
    passes: int = 0


class Places:
    """The places of those who are away."""

    __slots__ = ("_by_due", "_kept", "_kept_for", "passes_max")

    def __init__(self, passes_max: int) -> None:
        self.passes_max = passes_max
        self._kept: dict[int, Place] = {}
        self._by_due: list[tuple[Seconds, int]] = []  # a heap; may name places that are gone
        self._kept_for: int | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, identity: int, place: Place) -> None:
        """A client was refused and told to come back at `place.due`."""
        self._kept[identity] = place
        heappush(self._by_due, (place.due, identity))
        if len(self._kept) > PLACES_MAX or len(self._by_due) > 4 * PLACES_MAX:
            self._drop(heappop(self._by_due))
        favoured = self._kept.get(self._kept_for) if self._kept_for is not None else None
        if 0 < place.tries < TRIES_MAX and (favoured is None or place.since < favoured.since):
            self._kept_for = identity

    def back(self, identity: int, now: Seconds) -> Place | None:
        """The place of a client that is here again; it is no longer away."""
        self.expire(now)
        place = self._kept.pop(identity, None)
        if place is not None and self._kept_for == identity:
            self._choose()
        return place

    def favoured(self, now: Seconds) -> Place | None:
        """The one absent client that later ones pass only so often."""
        self.expire(now)
        kept_for = self._kept_for  # looked at after that, which may have chosen another
        return None if kept_for is None else self._kept.get(kept_for)

    def room_kept(self, now: Seconds, usable: int) -> Place | None:
        """The favoured one, if newcomers have to leave room for it: not before it was passed often enough,
        and not while it needs more than is `usable`, when nothing makes room for it."""
        place = self.favoured(now)
        if place is None or place.passes < self.passes_max or place.blocks > usable:
            return None
        return place

    def expire(self, now: Seconds) -> None:
        while self._by_due and self._by_due[0][0] + GRACE < now:
            self._drop(heappop(self._by_due))

    def _drop(self, entry: tuple[Seconds, int]) -> None:
        due, identity = entry
        place = self._kept.get(identity)
        if place is not None and place.due == due:
            del self._kept[identity]
            if self._kept_for == identity:
                self._choose()

    def _choose(self) -> None:
        waiting = [(p.since, i) for i, p in self._kept.items() if 0 < p.tries < TRIES_MAX]
        self._kept_for = min(waiting)[1] if waiting else None
