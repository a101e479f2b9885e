"""Option values that say where something is: checked when they are typed, and shown in one form.

Promises: what is returned can be used as it is; a mistake is told with an example of what is meant.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from kvgate.edge.listening import UNIX
from kvgate.edge.relay.upstream import Upstream

# click 8.1 has no generic ParamType to subscript when running; its later stubs ask for one.
if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType

# RFC 9110, section 5.6.2.
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
# sockaddr_un on Linux.
UNIX_PATH_MAX = 108


class Address(ParamType):
    """HOST:PORT, with an IPv6 host in brackets. Port 0 means any free port."""

    name = "HOST:PORT"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        if isinstance(value, tuple):
            return value
        host, colon, port = str(value).rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            self.fail(f"{value!r}: put an IPv6 address in brackets, as in [::1]:8080", param, ctx)
        if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
            self.fail(f"{value!r} is not HOST:PORT, for example 127.0.0.1:8080", param, ctx)
        return host, int(port)


class ListenAddress(Address):
    """HOST:PORT, or unix:/PATH, which is a host of that name and port 0."""

    name = "HOST:PORT"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        text = str(value)
        if isinstance(value, tuple) or not text.startswith(UNIX):
            return super().convert(value, param, ctx)
        path = text.removeprefix(UNIX)
        if not path.startswith("/"):
            self.fail(f"{text!r}: give the whole path, as in unix:/run/kvgate.sock", param, ctx)
        # The system's limit, including the byte that ends the name.
        if len(os.fsencode(path)) >= UNIX_PATH_MAX:
            self.fail(
                f"{text!r}: the path of a Unix socket has at most {UNIX_PATH_MAX - 1} bytes", param, ctx
            )
        return text, 0


class EngineUrl(ParamType):
    """Where the engine is: the client's own path is put behind it, so it has none."""

    name = "URL"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        try:
            upstream = Upstream.parse(text)
        except ValueError as wrong:
            self.fail(str(wrong), param, ctx)
        if upstream.path is not None:
            return text
        parts = urlsplit(text)
        if parts.path not in ("", "/") or parts.query or parts.fragment:
            self.fail(f"{text!r} has a path: give only {parts.scheme}://HOST:PORT, without /v1", param, ctx)
        shown = f"[{upstream.host}]" if ":" in upstream.host else upstream.host
        return f"{parts.scheme}://{shown}:{upstream.port}"


class UrlPath(ParamType):
    """A path of the engine, as a client asks for it."""

    name = "PATH"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if not text.startswith("/") or "?" in text or "#" in text:
            self.fail(f"{text!r} is not a path: it starts with / and has no query", param, ctx)
        return text


class HeaderName(ParamType):
    """The name of a request header."""

    name = "NAME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if not _TOKEN.fullmatch(text):
            self.fail(f"{text!r} is not the name of a header, for example x-session-id", param, ctx)
        return text
