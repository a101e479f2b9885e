"""The exact books of one pool: reserve, settle, release.

The law, checked at every change: a reservation is made only while
`reserved + blocks <= usable`, and `reserved` is the sum of the live reservations. When the engine
shrinks, what is held stays held and nothing is granted until it fits again.

Every operation is O(1). A reservation has the ledger's own number, so a client cannot name, reuse
or release somebody else's.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvgate.core.records import Key, Misuse, PoolFacts


class NotHeld(Misuse):
    """That reservation has ended already, or never was. Nothing was changed."""


class LedgerBroken(Exception):
    """The books do not add up. This is a defect in kvgate, never in its input."""


class Ledger:
    """Blocks and sequence slots of one pool."""

    __slots__ = ("_live", "_next", "double_releases", "facts", "reserved_blocks", "reserved_seqs")

    def __init__(self, facts: PoolFacts) -> None:
        self.facts = facts
        self.reserved_blocks = 0
        self.reserved_seqs = 0
        self.double_releases = 0
        self._live: dict[Key, tuple[int, int]] = {}
        self._next: Key = 1

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._live)

    def __repr__(self) -> str:
        return (
            f"<Ledger {self.reserved_blocks} of {self.facts.usable_blocks} blocks reserved, "
            f"{len(self._live)} live>"
        )

    @property
    def usable_blocks(self) -> int:
        """Blocks that may be reserved, and never less than what is: where the pool has shrunk, what is
        held stays so until it ends."""
        return max(self.facts.usable_blocks, self.reserved_blocks)

    @property
    def headroom(self) -> int:
        """Usable - reserved: below 0 while more is held than is usable."""
        return self.facts.usable_blocks - self.reserved_blocks

    @property
    def free_blocks(self) -> int:
        """Headroom, and 0 while more is held than is usable."""
        return max(0, self.headroom)

    @property
    def free_seqs(self) -> int | None:
        """Sequence slots left; None where the engine has no limit."""
        if self.facts.max_seqs is None:
            return None
        return max(0, self.facts.max_seqs - self.reserved_seqs)

    def new_key(self) -> Key:
        """A number that no reservation has had or will have again."""
        key = self._next
        self._next = key + 1
        return key

    def fits(self, blocks: int, seqs: int) -> bool:
        """True if `reserve` would succeed now."""
        facts = self.facts
        return self.reserved_blocks + blocks <= facts.usable_blocks and (
            facts.max_seqs is None or self.reserved_seqs + seqs <= facts.max_seqs
        )

    def reserve(self, blocks: int, seqs: int = 1, key: Key | None = None) -> Key | None:
        """Take `blocks` and `seqs`; return the reservation's number, or None if they do not fit.

        The caller owns what is returned and must `release` it exactly once.
        """
        if blocks < 0 or seqs < 0:
            raise Misuse(f"cannot reserve {blocks} blocks and {seqs} sequences")
        if not self.fits(blocks, seqs):
            return None
        if key is None:
            key = self.new_key()
        elif key in self._live or not 0 < key < self._next:
            raise Misuse(f"key {key} did not come from new_key, or is live already")
        self._live[key] = (blocks, seqs)
        self.reserved_blocks += blocks
        self.reserved_seqs += seqs
        return key

    def settle(self, key: Key, blocks: int) -> int:
        """Correct a reservation downwards to `blocks`; return how many came free.

        For an over-estimated prompt that has now been counted exactly. Never grows: asking for
        more raises `Misuse`, because growth could break the promise to everyone else.
        """
        held = self._live.get(key)
        if held is None:
            raise NotHeld(f"reservation {key} is not held")
        if not 0 <= blocks <= held[0]:
            raise Misuse(f"reservation {key} holds {held[0]} blocks and cannot be settled to {blocks}")
        self._live[key] = (blocks, held[1])
        freed = held[0] - blocks
        self.reserved_blocks -= freed
        return freed

    def release(self, key: Key) -> int:
        """Give everything back; return the blocks that came free.

        A second release raises `NotHeld`, is counted in `double_releases`, and changes nothing.
        """
        held = self._live.pop(key, None)
        if held is None:
            self.double_releases += 1
            raise NotHeld(f"reservation {key} is not held")
        self.reserved_blocks -= held[0]
        self.reserved_seqs -= held[1]
        if self.reserved_blocks < 0 or self.reserved_seqs < 0:
            raise LedgerBroken(f"{self.reserved_blocks} blocks and {self.reserved_seqs} sequences reserved")
        return held[0]

    def held(self, key: Key) -> int | None:
        """Blocks that a reservation holds, or None if it is not live."""
        held = self._live.get(key)
        return None if held is None else held[0]

    def resize(self, facts: PoolFacts) -> None:
        """The engine has other sizes now. Nothing held is lost or changed."""
        self.facts = facts

    def recount(self) -> None:
        """Check the books against the live reservations, in O(live). For idle moments and tests."""
        blocks = sum(held[0] for held in self._live.values())
        seqs = sum(held[1] for held in self._live.values())
        if (blocks, seqs) != (self.reserved_blocks, self.reserved_seqs):
            raise LedgerBroken(
                f"books say {self.reserved_blocks} blocks and {self.reserved_seqs} sequences, "
                f"the live reservations say {blocks} and {seqs}"
            )
