"""Finds out which engine answers at an address, and what its pool is.

Promises: only GETs that change nothing at any engine are sent (TensorRT-LLM's /metrics, which is
emptied by reading, never is); each is bounded in time and size; whatever comes back, the answer is a
`Found` that names what is unknown and the option that gives it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeAlias

from kvgate.edge.relay.heads import Headers, request_head
from kvgate.edge.relay.pool import EnginePool, EngineUnavailable
from kvgate.edge.upstreams.access import NEEDED
from kvgate.wire.engines.finding import found_in
from kvgate.wire.engines.found import Finding, Found, Given, Level, Page, Pages, refreshed
from kvgate.wire.engines.readers import READERS, SIGNS, recognised, signed

__all__ = [
    "Finding",
    "Found",
    "Given",
    "Level",
    "Page",
    "discover",
    "pages_of",
    "pool_fetch",
    "refreshed",
    "told_by",
]

PAGE_SECONDS = 5.0
PAGE_BYTES_MAX = 4 * 1024 * 1024
MODELS = "/v1/models"

Fetch: TypeAlias = Callable[[str, str, bytes | None], Awaitable[tuple[int, str]]]
"""`fetch(method, path, body)` -> status and text. Raises `OSError` or `EngineUnavailable`."""


async def discover(fetch: Fetch, engine_name: str | None = None, overrides: Given | None = None) -> Found:
    """What runs there. `engine_name` spares the guessing; `overrides` beat what is read."""
    return told_by(await pages_of(fetch, engine_name), engine_name, overrides)


def told_by(pages: Pages, engine_name: str | None = None, overrides: Given | None = None) -> Found:
    """What these pages of one engine come to."""
    given = overrides or Given()
    if all(page.status == 0 for page in pages.values()):
        why = next((page.text for page in pages.values() if page.text), "no answer")
        gone = found_in(engine_name or "generic", {}, given)
        return replace(gone, is_up=False, unknown=(f"the engine does not answer ({why})", *gone.unknown))
    name, doubt = (engine_name, None) if engine_name is not None else _named(pages)
    found = found_in(name, pages, given)
    refused = {path: page.status for path, page in pages.items() if page.status in (401, 403)}
    if not refused:
        return found if doubt is None else replace(found, unknown=(doubt, *found.unknown))
    asked = ", ".join(f"{status} at {path}" for path, status in list(refused.items())[:3])
    needs = f"the engine asks for an API key, and has been given none that it takes ({asked})"
    warning = Finding("key_needed", Level.WARNING, needs, NEEDED, doubts=True)
    found = replace(found, warnings=(*found.warnings, warning))
    # A page that is forbidden to everybody says nothing of keys; one that is not authorised does.
    needs_key = found.facts is None and (401 in refused.values() or MODELS in refused)
    if not needs_key:
        return found if doubt is None else replace(found, unknown=(doubt, *found.unknown))
    # Whatever else is unknown may be told to whoever has the key.
    rest = () if doubt is not None else found.unknown
    return replace(found, needs_key=True, unknown=(f"{needs}: {NEEDED}", *rest))


async def pages_of(fetch: Fetch, engine_name: str | None = None) -> dict[str, Page]:
    """The pages that tell about the engine, by path."""
    pages: dict[str, Page] = {}
    if engine_name is None:
        await _get(fetch, pages, MODELS)
        if pages[MODELS].status == 0:
            return pages
        if signed(pages) is None:
            for path in SIGNS:
                await _get(fetch, pages, path)
        known = recognised(pages)
        if len(known) != 1:
            return pages
        engine_name = known[0]
    reader = READERS[engine_name]
    for path in reader.paths:
        instead_of = reader.instead_of.get(path)
        if path not in pages and (instead_of is None or not pages[instead_of].is_ok):
            await _get(fetch, pages, path)
    return pages


def _named(pages: Pages) -> tuple[str, str | None]:
    known = recognised(pages)
    if len(known) == 1:
        return known[0], None
    which = f"its pages fit {' and '.join(known)}" if known else "its pages fit no engine that kvgate knows"
    return "generic", f"engine: {which}. Give it with --engine NAME"


async def _get(fetch: Fetch, pages: dict[str, Page], path: str) -> None:
    try:
        async with asyncio.timeout(PAGE_SECONDS):
            status, text = await fetch("GET", path, None)
    except TimeoutError:
        pages[path] = Page(0, f"no answer within {PAGE_SECONDS:g} s")
    except (OSError, EngineUnavailable) as failed:
        pages[path] = Page(0, str(failed) or type(failed).__name__)
    else:
        whole = len(text) <= PAGE_BYTES_MAX
        pages[path] = Page(status, text) if whole else Page(status=0, text=f"{path} is longer than 4 MiB")


def pool_fetch(pool: EnginePool, headers: Headers | None = None) -> Fetch:
    """A `Fetch` over the connections of a pool. `headers`: of each request (None: the engine's key)."""

    async def fetch(method: str, path: str, body: bytes | None = None) -> tuple[int, str]:
        target = pool.prefix + path.encode("ascii")
        data = body or b""
        own = pool.access.own if headers is None else headers
        sent = [*own, *([(b"content-type", b"application/json")] if data else [])]
        head = request_head(
            method.encode("ascii"), target, pool.authority, sent, body_bytes=len(data), peer=b"127.0.0.1"
        )
        answer = await pool.fetch(head + data)
        return answer.status, answer.body.decode("utf-8", "replace")

    return fetch
