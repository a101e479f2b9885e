"""The API key that an engine asks for: where it comes from, and when it is sent.

Promises: a key comes from an environment variable or a file, never from a command line, and is shown
nowhere: not in a log, a status, an error or a `repr`. kvgate's own questions carry it. A client's
request carries it, and no key of the client's, only where `replaces` says that kvgate itself decides who
may come in; else the engine judges the client by its own key, or by its having none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvgate.edge.relay.heads import Headers

if TYPE_CHECKING:
    from kvgate.config import Settings

# OpenAI's, Anthropic's and Azure's way of sending a key.
KEY_HEADERS = (b"authorization", b"x-api-key", b"api-key")
_ALL = frozenset(KEY_HEADERS)
_NONE: frozenset[bytes] = frozenset()
# What may stand in the value of a header: no spaces, no line ends.
_KEY = re.compile(r"[!-~]+")
NEEDED = (
    "give it with --upstream-api-key-env NAME or --upstream-api-key-file FILE (kvgate doctor and kvgate "
    "plan: --api-key-env NAME)"
)


class Source(Protocol):
    """Where the operator says that the key is."""

    @property
    def api_key_env(self) -> str | None: ...
    @property
    def api_key_file(self) -> str | None: ...
    @property
    def replace_client_keys(self) -> bool | None: ...


class Access:
    """The key of one engine (None: it has none). `own`: the header of kvgate's own questions."""

    __slots__ = ("_line", "own", "replaces")

    def __init__(self, key: str | None = None, *, replaces: bool = False) -> None:
        self.own: Headers = []
        self._line = b""
        self.replaces = replaces and key is not None
        if key is not None:
            value = b"Bearer " + key.encode("ascii")
            self.own = [(b"authorization", value)]
            self._line = b"authorization: " + value + b"\r\n"

    def __repr__(self) -> str:
        return f"<Access {'with' if self._line else 'without'} a key>"

    @property
    def towards(self) -> tuple[frozenset[bytes], bytes]:
        """For a client's request: names to leave out, and lines to add."""
        return (_ALL, self._line) if self.replaces else (_NONE, b"")


OPEN = Access()
"""An engine that asks for no key, or whose clients bring it."""


def access_of(given: Source, settings: Settings, environment: Mapping[str, str] | None = None) -> Access:
    """What the operator says of one engine, its own word before that for all. Raises `ValueError` for
    a key that is not there, without quoting it."""
    if given.api_key_env is not None or given.api_key_file is not None:
        name, file = given.api_key_env, given.api_key_file
    else:
        name, file = settings.upstream_api_key_env, settings.upstream_api_key_file
    if name is not None and file is not None:
        raise ValueError("the engine's API key is in a variable or in a file, not in both")
    key = None
    if name is not None:
        key = _checked(
            (os.environ if environment is None else environment).get(name, ""), f"the variable {name}"
        )
    elif file is not None:
        try:
            key = _checked(Path(file).read_text("utf-8"), file)
        except (OSError, UnicodeDecodeError) as wrong:
            raise ValueError(f"{file}: {type(wrong).__name__}, the engine's API key cannot be read") from None
    replaces = given.replace_client_keys
    if replaces is None:
        replaces = settings.replace_client_keys
    if replaces is None:
        # Where kvgate itself decides who may come in, the keys of clients are kvgate's.
        replaces = settings.api_keys is not None
    return Access(key, replaces=replaces)


def key_from(variable: str) -> str | None:
    """The key in an environment variable; None where it holds nothing. Raises `ValueError` for what can be
    no key, without quoting it."""
    text = os.environ.get(variable, "")
    return _checked(text, f"the variable {variable}") if text.strip() else None


def _checked(text: str, where: str) -> str:
    key = text.strip()
    if not key:
        raise ValueError(f"{where} is empty or not set: it must hold the engine's API key")
    if not _KEY.fullmatch(key):
        raise ValueError(f"{where}: an API key is one word of plain letters, digits and signs")
    return key


def key_in(headers: Headers) -> bytes | None:
    """The API key of a request; None where it has none."""
    for name, value in headers:
        if name.lower() in KEY_HEADERS:
            key = value.strip()
            if name.lower() == b"authorization":
                # A key may stand there without its scheme, and a scheme without a key.
                key = key.partition(b" ")[2].strip() or key
            if key and key.lower() != b"bearer":
                return key
    return None
