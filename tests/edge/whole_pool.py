"""A stream that takes everything that a pool of 100 blocks has to give, held for as long as a test needs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from harness import Client, Stack, payload, request

WHOLE = {"max_tokens": 81}  # with a prompt of 10: the 90 usable tokens


@asynccontextmanager
async def held(stack: Stack, script: dict[str, Any], **fields: Any) -> AsyncIterator[Client]:
    """A client whose stream has begun; `script` says how the engine answers it."""
    client = await Client.connect(stack.port)
    client.send(request(body=payload(**(WHOLE | fields)), script=script))
    await client.events(1)
    assert client.current.status == 200
    try:
        yield client
    finally:
        client.cut()
