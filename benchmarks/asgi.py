"""What the middleware adds to an ASGI application: CPU for a request and for a streamed piece.

    python benchmarks/asgi.py [--quick]

The bare application and the wrapped one take turns in one process, without a server, so the
difference is the middleware's. CPU of the process; the best of several rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

from kvgate import Admission
from kvgate.asgi import AdmissionMiddleware

ROUNDS = 5
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"word"}}]}\n\n'
BODY = json.dumps(
    {"messages": [{"role": "user", "content": "x" * 2000}], "max_tokens": 64, "stream": True}
).encode()


def application(pieces: int) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        json.loads((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(pieces):
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


async def spent(app: Any, requests: int) -> float:
    """Seconds of CPU for a request."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(BODY))],
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": BODY, "more_body": False}

    async def send(message: Any) -> None:
        pass

    started = time.process_time()
    for _ in range(requests):
        await app(scope, receive, send)
    return (time.process_time() - started) / requests


async def measure(requests: int) -> None:
    best: dict[tuple[str, int], float] = {}
    for _ in range(ROUNDS):
        for pieces in (1, 1001):
            bare = application(pieces)
            gate = Admission.from_blocks(1_000_000, 1, 100_000)
            wrapped = AdmissionMiddleware(bare, gate, count=lambda shape: 500, workers="own_pool")
            for name, app in (("bare", bare), ("wrapped", wrapped)):
                took = await spent(app, requests if pieces == 1 else max(5, requests // 100))
                best[name, pieces] = min(best.get((name, pieces), took), took)
    print(f"body {len(BODY):,} bytes, best of {ROUNDS} rounds of {requests:,} requests")
    for name in ("bare", "wrapped"):
        each = (best[name, 1001] - best[name, 1]) / 1000
        print(f"{name:8} {best[name, 1] * 1e6:8.1f} us a request {each * 1e6:8.2f} us a piece")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    asyncio.run(measure(500 if parser.parse_args().quick else 5_000))


if __name__ == "__main__":
    main()
