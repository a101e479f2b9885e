"""Reading the options again while kvgate serves: on SIGHUP, and for POST /reload of the admin server.

Promises: a mistake in the file changes nothing and is told in the words of a mistake at the start;
what cannot be changed while running is named. Runs on the gateway's loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from kvgate.config import Settings
from kvgate.edge.gateway import Gateway
from kvgate.edge.reload import CannotReload, plain


class Reloader:
    """Applies to `gateway` what `read` returns; `read` raises click's own errors."""

    def __init__(self, gateway: Gateway, read: Callable[[], Settings], tell: Callable[[str], None]) -> None:
        self._gateway = gateway
        self._read = read
        self._tell = tell

    def __call__(self) -> dict[str, Any]:
        """What was changed and what was kept, as plain values. Raises `CannotReload`."""
        try:
            reloaded = self._gateway.reload(self._read())
        except click.ClickException as wrong:
            raise CannotReload(wrong.format_message()) from None
        for line in reloaded.lines():
            self._tell(f"kvgate: reload: {line}")
        return {
            "changed": {
                name: {"from": plain(old), "to": plain(new)} for name, (old, new) in reloaded.changed.items()
            },
            "needs_restart": {
                name: {"is": plain(old), "not": plain(new)} for name, (old, new) in reloaded.kept.items()
            },
        }

    def on_signal(self) -> None:
        """For SIGHUP: nobody waits for the result, so a mistake is told like the rest."""
        try:
            self()
        except CannotReload as wrong:
            self._tell(f"kvgate: reload: nothing was changed: {wrong}")
