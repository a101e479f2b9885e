"""Which requests are priced, which pass free, and which are refused because they might generate.

Each engine has its own table: a path is priced or free only where that engine serves it so. All
other POSTs are refused, whatever they may do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from kvgate.wire.dialects.openai import Shape
from kvgate.wire.refusal import Dialect


@dataclass(frozen=True, slots=True)
class Route:
    """One priced endpoint: how its body is read, and how its refusals are written.

    `cap_name`: the field for the output cap, as messages name it.
    """

    read: Callable[[bytes], Shape]
    dialect: Dialect = Dialect.OPENAI
    cap_name: str = "max_tokens"


Routes: TypeAlias = Mapping[bytes, Route]

# These cannot make an engine generate (an upgrade to a web socket is not passed on).
FREE_METHODS = frozenset({b"GET", b"HEAD", b"OPTIONS"})


def route_for(routes: Routes, method: bytes, path: bytes) -> Route | None:
    """The priced endpoint of a request; None for one that is not priced.

    The path must match to the byte: what an engine may take for the same path (a doubled or
    trailing slash, an escaped letter) is then refused as unpriced, never passed on unpriced.
    """
    return routes.get(path) if method == b"POST" else None


def is_free(free_posts: frozenset[bytes], method: bytes, path: bytes) -> bool:
    """True for a request that cannot make the engine generate."""
    return method in FREE_METHODS or (method == b"POST" and path in free_posts)


def unpriced_message(method: bytes, path: bytes) -> str:
    """Why a request is neither priced nor passed on, and what the operator can do about it."""
    named = f"{method.decode('ascii', 'replace')} {path.decode('ascii', 'replace')[:200]}"
    return (
        f"{named} is not priced by this gateway and might generate. "
        "The operator can pass it on with --allow-path."
    )
