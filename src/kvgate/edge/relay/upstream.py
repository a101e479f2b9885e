"""Where the engine is: an address read out of what the operator wrote, and ways to connect to it.

Promises: a name is looked up for each new connection, and all its addresses are tried, the next one
a moment after the one before, so that a dead address costs that moment and not the request; what
could not be done is said in words (`reason_of`) that name no address, because clients read them.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

# RFC 8305, section 5: the recommended delay before the next address is tried.
NEXT_ADDRESS_SECONDS = 0.25

FORMS = "http://HOST:PORT, https://HOST:PORT, unix:/PATH or http+unix://%2FPATH"


@dataclass(frozen=True, slots=True)
class Upstream:
    """`host:port`, or the Unix socket at `path`. `prefix` comes before every target."""

    host: str
    port: int
    path: str | None
    is_tls: bool
    prefix: bytes
    authority: bytes

    @classmethod
    def parse(cls, url: str) -> Upstream:
        """Read one of `FORMS`. Raises `ValueError`."""
        if url.startswith("unix:"):
            path = url.removeprefix("unix:")
            return cls._at_socket(path.removeprefix("//"), "", url)
        parts = urlsplit(url)
        if parts.scheme == "http+unix":
            return cls._at_socket(unquote(parts.netloc), parts.path, url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise ValueError(f"an upstream is {FORMS}, got {url!r}")
        is_tls = parts.scheme == "https"
        default = 443 if is_tls else 80
        port = default if parts.port is None else parts.port
        host = parts.hostname if parts.hostname.isascii() else parts.hostname.encode("idna").decode("ascii")
        shown = f"[{host}]" if ":" in host else host
        authority = shown if parts.port in (None, default) else f"{shown}:{port}"
        return cls(host, port, None, is_tls, _prefix(parts.path), authority.encode("ascii"))

    @classmethod
    def _at_socket(cls, path: str, prefix: str, url: str) -> Upstream:
        if not path.startswith("/"):
            raise ValueError(
                f"a Unix socket is named by its whole path, as in unix:/run/engine.sock: {url!r}"
            )
        return cls("localhost", 0, path, False, _prefix(prefix), b"localhost")

    @property
    def is_literal(self) -> bool:
        """True where there is nothing to look up."""
        try:
            ipaddress.ip_address(self.host.partition("%")[0])
        except ValueError:
            return False
        return True

    async def open(
        self,
        loop: asyncio.AbstractEventLoop,
        factory: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
    ) -> None:
        """Make a connection and give it to `factory`'s protocol. Raises `OSError`."""
        if self.path is not None:
            await loop.create_unix_connection(factory, self.path)
            return
        secured: dict[str, Any] = {"ssl": tls, "server_hostname": self.host} if self.is_tls else {}
        if self.is_literal:
            await loop.create_connection(factory, self.host, self.port, **secured)
            return
        found = await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        sock = await first_to_answer(loop, interleaved(found))
        try:
            await loop.create_connection(factory, sock=sock, **secured)
        except BaseException:
            sock.close()
            raise


Found = tuple[int, int, int, str, Any]


def interleaved(found: Sequence[Found]) -> list[Found]:
    """IPv6 and IPv4 in turn, each in the resolver's order: a family that is down costs one delay."""
    first = found[0][0]
    ours = [item for item in found if item[0] == first]
    others = [item for item in found if item[0] != first]
    mixed: list[Found] = []
    while ours or others:
        mixed += ours[:1] + others[:1]
        ours, others = ours[1:], others[1:]
    return mixed


async def first_to_answer(
    loop: asyncio.AbstractEventLoop, addresses: Sequence[Found], delay: float = NEXT_ADDRESS_SECONDS
) -> socket.socket:
    """A connected socket to the first address that takes the connection. Raises the last `OSError`."""
    tasks: set[asyncio.Task[socket.socket]] = set()
    left = list(addresses)
    failed: OSError = OSError("the name has no address")
    try:
        while left or tasks:
            if left:
                tasks.add(loop.create_task(_connected(loop, left.pop(0))))
            done, tasks = await asyncio.wait(
                tasks, timeout=delay if left else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                error = task.exception()
                if error is None:
                    tasks |= done - {task}
                    return task.result()
                if not isinstance(error, OSError):
                    raise error
                failed = error
        raise failed
    finally:
        for task in tasks:
            task.cancel()
            task.add_done_callback(_close_if_late)


async def _connected(loop: asyncio.AbstractEventLoop, address: Found) -> socket.socket:
    family, kind, protocol, _, where = address
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, where)
    except BaseException:
        sock.close()
        raise
    return sock


def _close_if_late(task: asyncio.Task[socket.socket]) -> None:
    """Another address was quicker; a connection that was made all the same is not needed."""
    with suppress(asyncio.CancelledError, OSError):
        task.result().close()


def reason_of(error: OSError) -> str:
    """Why a connection could not be made, without naming the address."""
    if isinstance(error, TimeoutError) and not error.errno:
        return "it did not answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message}); --upstream-ca names its CA"
    if isinstance(error, ssl.SSLError):
        return f"no TLS with it ({error.reason or error})"
    if isinstance(error, socket.gaierror):
        return f"its name cannot be looked up ({error.strerror})"
    if error.errno and error.errno > 0:
        return os.strerror(error.errno).lower()
    return str(error) or type(error).__name__


def _prefix(path: str) -> bytes:
    return path.rstrip("/").encode("ascii")
