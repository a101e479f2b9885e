"""What a connection and its requests need of the gateway that they belong to.

The relay knows this and no more, so it can be read, and tested, without the gateway.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from kvgate.config import Settings
from kvgate.core.gate import Gate
from kvgate.core.records import Ask
from kvgate.edge.relay.body_memory import BodyMemory
from kvgate.edge.relay.finished import Finished
from kvgate.edge.relay.heads import Headers
from kvgate.edge.upstreams.routing import Fleet
from kvgate.edge.upstreams.upstream import Upstream
from kvgate.wire.dialects.openai import Shape


class Host(Protocol):
    """`edge.gateway.Gateway`, as seen from below."""

    settings: Settings
    loop: asyncio.AbstractEventLoop
    allow_paths: frozenset[bytes]
    is_draining: bool
    requests: int
    bodies: BodyMemory
    clients: set[Any]
    connections_max: int
    upstreams: list[Upstream]
    fleet: Fleet

    @property
    def gate(self) -> Gate: ...

    def may_enter(self, headers: Headers) -> bool: ...

    def choose(
        self,
        pools: tuple[Upstream, ...],
        shape: Shape,
        prompts: tuple[int, ...] | None,
        headers: Headers,
    ) -> tuple[Upstream, Ask]: ...

    def observe(self, finished: Finished) -> None: ...
