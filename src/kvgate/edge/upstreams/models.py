"""The models of all engines as one list, and how one engine's list is read.

Promise: an engine's own objects are passed on as they are; of two with the same id the first is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from kvgate.edge.upstreams.upstream import Upstream

PATH = b"/v1/models"


def read_models(body: bytes) -> list[dict[str, Any]]:
    """The objects in an answer to GET /v1/models; none in one that is something else."""
    try:
        listed = json.loads(body)["data"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    if not isinstance(listed, list):
        return []
    return [each for each in listed if isinstance(each, dict) and isinstance(each.get("id"), str)]


def merged(upstreams: Iterable[Upstream]) -> bytes:
    """The body of our own answer to GET /v1/models."""
    found: dict[str, dict[str, Any]] = {}
    for upstream in upstreams:
        own = {each["id"]: each for each in upstream.model_objects}
        for name in sorted(upstream.models or ()):
            # A name of the operator's for a model that the engine lists under another.
            like = own.get(name) or own.get(upstream.aliases.get(name, "")) or {"object": "model"}
            found.setdefault(name, like if like.get("id") == name else {**like, "id": name})
    return json.dumps({"object": "list", "data": list(found.values())}).encode()


def named_in(body: bytes) -> str | None:
    """The model that a request without a price names in its body, if it does."""
    try:
        name = json.loads(body)["model"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return name if isinstance(name, str) else None
