"""A request as it came, before anybody has looked at what it asks for."""

from __future__ import annotations

from kvgate.edge.relay.heads import Headers, Known


class Request:
    """One request. `pieces` collects its body while it arrives; then `body` is whole.

    `known`: what the names of its headers say, once they are all there.
    """

    __slots__ = (
        *("body", "body_bytes", "headers", "is_http11", "keep_alive", "known", "method", "pieces"),
        *("target", "wants_continue"),
    )

    def __init__(self) -> None:  # by hand: a dataclass takes twice as long over its defaults
        self.method = b""
        self.target = b""
        self.headers: Headers = []
        self.known: Known | None = None
        self.body = b""
        self.is_http11 = True
        self.keep_alive = True
        self.wants_continue = False
        self.body_bytes = 0
        self.pieces: list[bytes] = []
