"""Where a request stands. docs/lifecycle.md draws the ways between these states."""

from __future__ import annotations

import enum


class State(enum.Enum):
    RECEIVED = enum.auto()
    COUNTING = enum.auto()
    WAITING = enum.auto()
    CONNECTING = enum.auto()
    SENDING = enum.auto()
    STREAMING = enum.auto()
    ENDED = enum.auto()
