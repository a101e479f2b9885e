"""Children of a chaos run: started with pipes, ended by asking first."""

from __future__ import annotations

import asyncio
import os
import socket
import sys


async def spawn(module: str, *arguments: str) -> asyncio.subprocess.Process:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVGATE_")}
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments), stdin=pipe, stdout=pipe, env=environment, limit=1 << 26
    )


async def finish(process: asyncio.subprocess.Process) -> None:
    """Close its input, which ends the gateway's host; then insist."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        async with asyncio.timeout(0.1 if process.returncode is None else 0):
            await process.wait()
    except TimeoutError:
        process.terminate()
        try:
            async with asyncio.timeout(8.0):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
