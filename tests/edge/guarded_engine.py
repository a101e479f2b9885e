"""Engines that ask for a key: one that shows given pages, and the real llama.cpp server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvgate.wire.engines.found import Page

_LENGTH = re.compile(rb"(?i)\r\ncontent-length: (\d+)\r\n")
_TIMEOUT = 60.0
# What each engine shows to those who have no key.
PUBLIC: dict[str, tuple[str, ...]] = {
    "vllm": ("/metrics", "/version", "/tokenize"),
    "sglang": ("/metrics",),
    "llamacpp": (),
    "tgi": ("/info", "/metrics"),
    "lmdeploy": ("/metrics",),
    "tensorrt-llm": (),
    "generic": (),
}


@dataclass
class Guarded:
    """Shows `pages` to whoever has `key`, and `public` ones to all. Keeps the heads of all requests."""

    pages: Mapping[str, Page]
    key: str
    public: tuple[str, ...] = ()
    seen: list[bytes] = field(default_factory=list)
    url: str = ""

    def posts(self, path: bytes) -> list[bytes]:
        return [head for head in self.seen if head.startswith(b"POST " + path)]

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = _LENGTH.search(head)
                await reader.readexactly(int(length[1]) if length else 0)
                self.seen.append(head)
                page = self._page(head)
                body = page.text.encode()
                start = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\n" % page.status
                writer.write(start + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    def _page(self, head: bytes) -> Page:
        method, target = head.split(b" ", 2)[:2]
        path = target.decode()
        if path not in self.public and keys_in(head) != [f"Bearer {self.key}".encode()]:
            return Page(401, '{"error":"Unauthorized"}')
        if method == b"POST":
            return Page(200, json.dumps({"tokens": [1, 2, 3], "count": 3, "input_tokens": 3, "length": 3}))
        return self.pages.get(path, Page(404, "{}"))


def keys_in(head: bytes) -> list[bytes]:
    """The values of all `Authorization` lines of a request."""
    return re.findall(rb"(?i)\r\nauthorization: ?([^\r]*)", head)


@asynccontextmanager
async def guarded(
    pages: Mapping[str, Page], key: str, public: tuple[str, ...] = ()
) -> AsyncIterator[Guarded]:
    engine = Guarded(pages, key, public)
    server = await asyncio.start_server(engine.talk, "127.0.0.1", 0)
    engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield engine
    finally:
        server.close()


# The embedded engine's own child, but for the key, which it takes from its environment.
_CHILD = """
import json, os, sys, threading
import xllamacpp
from kvgate.edge import embedded_child

class Guarded(xllamacpp.CommonParams):
    def __init__(self):
        super().__init__()
        self.api_keys = [os.environ["TEST_ENGINE_KEY"]]

xllamacpp.CommonParams = Guarded
ready = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
options = json.loads(sys.argv[1])
embedded_child.end_with_parent(options["parent"])
server = embedded_child.serve(options)
print(server.listening_address, file=ready, flush=True)
threading.Event().wait()
"""


@contextmanager
def guarded_llamacpp(model: Path, key: str, *, cells: int = 2048, slots: int = 4) -> Iterator[str]:
    """The address of a real llama.cpp server that was started with this key as `--api-key`."""
    options = {
        "model": str(model),
        "alias": model.stem,
        "cells": cells,
        "slots": slots,
        "context": None,
        "unified": True,
        "threads": 2,
        "parent": os.getpid(),
    }
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"TEST_ENGINE_KEY": key},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        address = child.stdout.readline().decode().strip()
        assert address, f"llama.cpp did not start: status {child.poll()}"
        yield address if address.startswith("http") else f"http://{address}"
    finally:
        child.stdin.close()  # the child ends with it
        child.stdout.close()
        try:
            child.wait(_TIMEOUT)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
