"""Signs of life for a client whose stream waits in the line, where the operator wants them.

Promise: nothing is written in the first `every` seconds. From the first comment on the answer has its
head, 200 and an event stream, so whatever comes later has to be told within it: a refusal as an error
event (`asking`), the engine's answer without its head (`late_answer`). Knows no state and no room.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvgate.edge.relay.own_answers import event_stream_head
from kvgate.edge.relay.request import Request
from kvgate.wire.chunks import frame

if TYPE_CHECKING:
    from kvgate.edge.relay.client import ClientConnection

# A line that begins with a colon is skipped by everything that reads events.
COMMENT = frame(b": waiting\n\n")


class Comments:
    """Of one request: one comment `every` so many seconds between `begin` and `stop`."""

    __slots__ = ("_client", "_every", "_loop", "_request", "_timer", "has_head")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, client: ClientConnection, request: Request, every: float
    ) -> None:
        self._loop = loop
        self._client = client
        self._request = request
        self._every = every
        self._timer: asyncio.TimerHandle | None = None
        self.has_head = False

    def begin(self) -> None:
        """It waits from now on; it may have waited before, for another engine."""
        self._timer = self._loop.call_later(self._every, self._comment)

    def stop(self) -> None:
        """It waits no longer. Twice is once."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _comment(self) -> None:
        head = b"" if self.has_head else event_stream_head(self._request)
        self.has_head = True
        self._client.write_ahead(head + COMMENT)
        self.begin()
