"""How many bytes of request bodies the gateway holds, over all connections, and may hold.

A body is held from its first byte until the engine begins to answer (before that it may have to be
sent again). The limit bounds the sum; each single body has a limit of its own.
"""

from __future__ import annotations


class BodyMemory:
    """A count of bytes with a limit. What was taken must be given back."""

    __slots__ = ("held", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    def has_room(self, size: int) -> bool:
        return self.held + size <= self.limit

    def take(self, size: int) -> bool:
        """Count `size` more bytes; False, and nothing counted, where they are too many."""
        if self.held + size > self.limit:
            return False
        self.held += size
        return True

    def give(self, size: int) -> None:
        self.held -= size
