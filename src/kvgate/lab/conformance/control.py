"""The suite's own line to the scripted engine: what requests shall get, and what the engine has seen.

Promise: nothing here goes through the gateway. One connection a call, so that it disturbs no count.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from typing import Any
from urllib.parse import urlsplit

POLL_SECONDS = 0.01


class NoEngine(Exception):
    """The address is not that of a scripted engine."""


def host_and_port(address: str) -> tuple[str, int]:
    """Of `http://host:port` or `host:port`. Raises ValueError."""
    parts = urlsplit(address if "//" in address else f"//{address}")
    if parts.scheme not in ("", "http") or not parts.hostname:
        raise ValueError(f"{address!r} is not an address like http://127.0.0.1:8000")
    return parts.hostname, parts.port or 80


class EngineControl:
    """Drives and reads a scripted engine over HTTP."""

    def __init__(self, address: str) -> None:
        self.host, self.port = host_and_port(address)

    async def _call(self, method: str, path: str, body: bytes = b"") -> Any:
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port)
            try:
                writer.write(
                    b"%s %s HTTP/1.1\r\nhost: engine\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
                    % (method.encode(), path.encode(), len(body))
                    + body
                )
                answer = await reader.read()
            finally:
                writer.close()
                await writer.wait_closed()
            return json.loads(answer.partition(b"\r\n\r\n")[2])
        except (OSError, ValueError) as error:
            raise NoEngine(
                f"no scripted engine answers at {self.host}:{self.port} ({error}). "
                "Start one: python -m kvgate.lab.scripted_engine --port 9000"
            ) from None

    async def stats(self) -> dict[str, Any]:
        """Counters of the engine. Raises `NoEngine`."""
        stats = await self._call("GET", "/script/stats")
        if "generations" not in stats:
            raise NoEngine(f"{self.host}:{self.port} answers, but is not a scripted engine")
        return dict(stats)

    async def plan(self, **script: Any) -> str:
        """Set what the requests that carry the marker returned here will get."""
        marker = secrets.token_hex(5)
        await self._call("POST", "/script/plan", json.dumps({marker: script}).encode())
        return f"kgc-{marker}"

    async def cache(self, tokens: int) -> None:
        """Let the engine's KV cache overflow beyond so many tokens; 0: never."""
        await self._call("GET", f"/script/cache?{tokens}")
        await self._call("GET", "/script/stats?reset")

    async def log(self, marker: str, kind: str | None = "generation") -> list[dict[str, Any]]:
        """The marked requests that arrived, oldest first. `kind` None: counting calls as well."""
        seen = await self._call("GET", f"/script/log?{marker.removeprefix('kgc-')}")
        return [record for record in seen if kind in (None, record["kind"])]

    async def arrived(
        self, marker: str, within: float, *, kind: str | None = "generation"
    ) -> dict[str, Any] | None:
        """The first such request, as soon as it is there; None where none came in time (seconds)."""
        end = time.monotonic() + within
        while not (seen := await self.log(marker, kind)):
            if time.monotonic() > end:
                return None
            await asyncio.sleep(POLL_SECONDS)
        return seen[0]

    async def ended(self, marker: str, within: float) -> bool:
        """Whether no marked request is under way any more, within these seconds."""
        end = time.monotonic() + within
        while any(r["ended"] is None for r in await self.log(marker, None)):
            if time.monotonic() > end:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True
