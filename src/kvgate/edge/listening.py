"""Where clients come in: TCP on one or more addresses, or a Unix socket; plain or TLS.

Promises: a client that vanishes without a word is noticed within about `client_idle_timeout`, because the
system asks after it; a Unix socket left over by a dead process is replaced, one in use is not; a
port or path that cannot be had is an `OSError` before anything is served.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import Any

# Connections that the system holds until they are taken: a burst of 2,000 in the time of one stall.
# Linux cuts it down to net.core.somaxconn (4096 by default).
LISTEN_BACKLOG = 4096
# For the TLS handshake; a connection that does not get that far is not counted as one.
HANDSHAKE_SECONDS = 10.0
UNIX = "unix:"


class Listener:
    """The listening sockets of one gateway."""

    def __init__(self, host: str, port: int, *, tls: ssl.SSLContext | None, idle_timeout: float) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self._idle_timeout = idle_timeout
        self._path: str | None = None
        self._sockets: list[socket.socket] = []
        self._servers: list[asyncio.AbstractServer] = []

    @property
    def is_open(self) -> bool:
        return bool(self._servers)

    @property
    def port(self) -> int:
        """The port that is listened on; differs from the setting where that is 0. 0: a Unix socket."""
        if self._path is not None:
            return 0
        return int(self._sockets[0].getsockname()[1])

    async def open(self, loop: asyncio.AbstractEventLoop, factory: Callable[[], asyncio.Protocol]) -> None:
        """Listen, and give each connection to a new protocol. Raises `OSError`."""
        try:
            if self._host.startswith(UNIX):
                self._bind_path(self._host.removeprefix(UNIX))
            else:
                await self._bind(loop)
            for sock in self._sockets:
                self._servers.append(await self._serve(loop, factory, sock))
        except BaseException:
            self.close()
            raise

    def watch(self, idle_timeout: float) -> None:
        """From now on, connections that come are asked after in this time (seconds)."""
        self._idle_timeout = idle_timeout
        if self._path is None:
            for sock in self._sockets:
                for level, name, value in liveness(idle_timeout):
                    sock.setsockopt(level, name, value)

    def close(self) -> None:
        """Take nobody any more. Connections that are there live on."""
        for server in self._servers:
            server.close()
        for sock in self._sockets:
            sock.close()
        if self._path is not None and self._servers:
            with suppress(FileNotFoundError):
                os.unlink(self._path)
        self._servers, self._sockets = [], []

    async def _serve(
        self, loop: asyncio.AbstractEventLoop, factory: Callable[[], asyncio.Protocol], sock: socket.socket
    ) -> asyncio.AbstractServer:
        options: dict[str, Any] = {"sock": sock, "backlog": LISTEN_BACKLOG}
        if self._tls is not None:
            options |= {"ssl": self._tls, "ssl_handshake_timeout": HANDSHAKE_SECONDS}
        if self._path is not None:
            return await loop.create_unix_server(factory, **options)
        return await loop.create_server(factory, **options)

    async def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        found = await loop.getaddrinfo(
            self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        port = self._port
        for family, kind, protocol, _, where in dict.fromkeys(found):
            sock = socket.socket(family, kind, protocol)
            self._sockets.append(sock)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                # Each family has a socket of its own, so that neither shadows the other.
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # All names of one host get the same port, also where any would do.
            sock.bind((where[0], port, *where[2:]))
            port = sock.getsockname()[1]
        self.watch(self._idle_timeout)

    def _bind_path(self, path: str) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sockets.append(sock)
        sock.setblocking(False)
        _clear(path)
        sock.bind(path)
        self._path = path


def liveness(idle_timeout: float) -> list[tuple[int, int, int]]:
    """Socket options with which a dead peer is noticed in `idle_timeout` seconds, and about a quarter more.

    Set on the listening socket: on Linux, connections inherit them, which saves calls for each.
    """
    quarter = max(1, round(idle_timeout / 4))
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (
        ("TCP_KEEPIDLE", quarter),
        ("TCP_KEEPINTVL", quarter),
        ("TCP_KEEPCNT", 4),
        # Also where data wait for an answer that does not come, when no probes are sent.
        ("TCP_USER_TIMEOUT", max(1000, round(idle_timeout * 1000))),
    ):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options


def _clear(path: str) -> None:
    """Remove a socket that nobody listens on. Raises `OSError` where somebody does."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return  # binding to it will say what is wrong
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
