"""Every example runs, and shows what it says: against the real gateway and the scripted engine."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvgate.config import Settings, at
from kvgate.core.records import PoolFacts
from kvgate.edge.gateway import Gateway

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WITHIN = 30.0
# An answer that goes on until its client leaves.
ENDLESS = json.dumps({"chunks": 100_000, "interval_ms": 20})
FACTS = PoolFacts(
    total_blocks=100, block_size=1, context=100, max_seqs=8, safety_fraction=1.0, engine="llamacpp"
)


@asynccontextmanager
async def python(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(WITHIN):
            yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


@asynccontextmanager
async def running_gateway() -> AsyncIterator[Gateway]:
    async with python("-m", "kvgate.lab.scripted_engine", "--port", "0") as engine:
        assert engine.stdout is not None
        port = json.loads(await engine.stdout.readline())["port"]
        settings = Settings(
            upstreams=at(f"http://127.0.0.1:{port}"),
            engine="llamacpp",
            listen_port=0,
            abort_grace=0.05,
            max_wait=0.0,
            drain_timeout=0.0,
        )
        gateway = Gateway(settings, FACTS)
        await gateway.start()
        try:
            yield gateway
        finally:
            await gateway.stop()


async def hold_the_pool(gateway: Gateway, max_tokens: int) -> asyncio.StreamWriter:
    """Returns once an endless answer has begun; closing the writer ends it."""
    asked = {"messages": [{"role": "user", "content": "hold"}], "max_tokens": max_tokens, "stream": True}
    body = json.dumps(asked)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\nx-script: {ENDLESS}\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
    assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
    return writer


async def test_the_library_example_runs_three_at_once_and_ends_with_nothing_reserved() -> None:
    async with python(str(EXAMPLES / "library.py")) as example:
        printed = (await example.communicate())[0].decode()
    assert example.returncode == 0, printed
    assert "at most 3 at once, 0 blocks reserved at the end" in printed
    assert "(kv_capacity_exceeded); a cap of 1743 would fit" in printed


async def test_the_openai_example_is_refused_while_busy_and_answered_when_it_comes_back() -> None:
    async with running_gateway() as gateway:
        holder = await hold_the_pool(gateway, 60)
        url = f"http://127.0.0.1:{gateway.port}/v1"
        arguments = (str(EXAMPLES / "openai_sdk.py"), "--base-url", url, "--max-tokens", "50")
        async with python(*arguments) as example:
            assert example.stdout is not None
            first = (await example.stdout.readline()).decode()
            holder.close()
            printed = first + (await example.communicate())[0].decode()
    assert example.returncode == 0, printed
    assert first.startswith("busy (kv_capacity): told to come back in "), printed
    # The holder's prompt counts as 1 token and this one's as 5: 100 - 60 blocks are left.
    assert "or ask for 36 tokens or less" in printed, printed
    assert "\nanswer: t" in printed, printed
    assert "refused for good (413 context_length_exceeded)" in printed, printed


async def test_the_plain_http_example_obeys_retry_after_and_shows_what_was_reserved() -> None:
    async with running_gateway() as gateway:
        holder = await hold_the_pool(gateway, 80)
        url = f"http://127.0.0.1:{gateway.port}"
        async with python(str(EXAMPLES / "plain_http.py"), "--url", url) as example:
            assert example.stdout is not None
            first = (await example.stdout.readline()).decode()
            holder.close()
            printed = first + (await example.communicate())[0].decode()
    assert example.returncode == 0, printed
    assert first == "429 Too Many Requests\n", printed
    assert "\nretry-after: " in printed, printed
    assert "x-kvgate-reason: kv_capacity" in printed, printed
    assert "\n200 OK\n" in printed, printed
    assert "x-kvgate-output-cap: 32" in printed, printed
