"""Inside vLLM, below kvgate's middleware: sees what reaches vLLM, and answers the suite's control calls.

`--middleware witness.Witness --middleware kvgate.vllm.Middleware`, the last of which stands outermost.
Promises: vLLM does the work. Of a script only the length of the answer and its pace are played, by
asking vLLM for fewer tokens and by passing its pieces on more slowly; a fault cannot be.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

GENERATING = ("/v1/chat/completions", "/v1/completions")
CHUNKS = 16
MARKER = re.compile(rb"kgc-([0-9a-f]{10})")


class Witness:
    def __init__(self, app: Any) -> None:
        self.app = app
        self.scripts: dict[str, Any] = {}
        self.records: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            if scope["type"] == "http" and scope["path"].startswith("/script/"):
                await self._tell(scope, send)
                return
            await self.app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        if scope["path"] == "/script/plan":
            self.scripts |= json.loads(body)
            await _answer(send, {})
            return
        await self._pass(scope, body, receive, send)

    async def _tell(self, scope: Any, send: Any) -> None:
        query = scope["query_string"].decode()
        if scope["path"] == "/script/log":
            await _answer(send, [record for record in self.records if record["marker"] == query])
            return
        made = [record for record in self.records if record["kind"] == "generation"]
        stats = {
            "generations": len(made),
            "open": sum(record["ended"] is None for record in self.records),
            "unfinished": sum(record["how"] == "broken" for record in made),
        }
        await _answer(send, stats)

    async def _pass(self, scope: Any, body: bytes, receive: Any, send: Any) -> None:
        found = MARKER.search(body)
        marker = found[1].decode() if found else ""
        script = self.scripts.get(marker, {})
        kind = "generation" if scope["path"] in GENERATING else "count"
        record = {
            "marker": marker,
            "kind": kind,
            "path": scope["path"],
            "body": body.decode("utf-8", "replace"),
        }
        record |= {"arrived": time.monotonic(), "ended": None, "how": "broken"}
        self.records.append(record)
        if kind == "generation":
            body = _shortened(body, script.get("chunks", CHUNKS))
        pace = script.get("interval_ms", 0) / 1000
        given = False

        async def replay() -> Any:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def paced(message: Any) -> None:
            if message["type"] == "http.response.start":
                await asyncio.sleep(script.get("first_delay_ms", 0) / 1000)
            elif kind == "generation":
                await asyncio.sleep(pace)
                if not message.get("more_body", False):
                    record["how"] = "whole"
            await send(message)

        length = (b"content-length", b"%d" % len(body))
        headers = [field for field in scope["headers"] if field[0] != b"content-length"]
        try:
            await self.app({**scope, "headers": [*headers, length]}, replay, paced)
        finally:
            record["ended"] = time.monotonic()


def _shortened(body: bytes, chunks: int) -> bytes:
    """What vLLM is asked for: no more tokens than the script has, and these for certain."""
    try:
        fields = json.loads(body)
    except ValueError:
        return body
    cap = min(chunks, fields.pop("max_completion_tokens", None) or fields.get("max_tokens") or chunks)
    return json.dumps(fields | {"max_tokens": cap, "ignore_eos": True}).encode()


async def _answer(send: Any, shown: Any) -> None:
    body = json.dumps(shown).encode()
    headers = [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
