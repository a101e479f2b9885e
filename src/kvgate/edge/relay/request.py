"""A request as it came, before anybody has looked at what it asks for."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvgate.edge.relay.heads import Headers


@dataclass(slots=True)
class Request:
    """One request. `pieces` collects its body while it arrives; then `body` is whole."""

    method: bytes = b""
    target: bytes = b""
    headers: Headers = field(default_factory=list)
    body: bytes = b""
    is_http11: bool = True
    keep_alive: bool = True
    wants_continue: bool = False
    body_bytes: int = 0
    pieces: list[bytes] = field(default_factory=list)
