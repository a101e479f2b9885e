"""Which requests are priced, which pass free, and which are refused because they might generate."""

from __future__ import annotations

from collections.abc import Callable

from kvgate.wire.dialects.openai import Shape, read_chat, read_completion

PRICED: dict[bytes, Callable[[bytes], Shape]] = {
    b"/v1/chat/completions": read_chat,
    b"/v1/completions": read_completion,
}
# These cannot make an engine generate (an upgrade to a web socket is not passed on).
FREE_METHODS = frozenset({b"GET", b"HEAD", b"OPTIONS"})


def reader_for(method: bytes, path: bytes) -> Callable[[bytes], Shape] | None:
    """How to read the body of a priced request; None for one that is not priced.

    The path must match to the byte: what an engine may take for the same path (a doubled or
    trailing slash, an escaped letter) is then refused as unpriced, never passed on unpriced.
    """
    return PRICED.get(path) if method == b"POST" else None


def unpriced_message(method: bytes, path: bytes) -> str:
    """Why a request is neither priced nor passed on, and what the operator can do about it."""
    named = f"{method.decode('ascii', 'replace')} {path.decode('ascii', 'replace')[:200]}"
    return (
        f"{named} is not priced by this gateway and might generate. "
        "The operator can pass it on with --allow-path."
    )
