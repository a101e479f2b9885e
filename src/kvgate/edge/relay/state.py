"""Where a request stands, and every way from one state to the next.

Promise: an exchange moves along `NEXT` and nowhere else; a move that is not in the table is a
defect and is raised as one. docs/lifecycle.md draws the same table, and a test compares them.
"""

from __future__ import annotations

import enum


class State(enum.Enum):
    RECEIVED = "received"
    COUNTING = "counting"
    COUNTED = "counted"
    WAITING = "waiting"
    ADMITTED = "admitted"
    CONNECTING = "connecting"
    SENDING = "sending"
    STREAMING = "streaming"
    DRAINING = "draining"
    RELEASED = "released"

    # Enum's own hashes the name, in Python, at each look into NEXT.
    __hash__ = object.__hash__


# fmt: off
NEXT: dict[State, tuple[State, ...]] = {
    # A path without a price goes to the engine at once.
    State.RECEIVED: (State.COUNTING, State.COUNTED, State.CONNECTING, State.SENDING, State.RELEASED),
    State.COUNTING: (State.COUNTED, State.RELEASED),
    State.COUNTED: (State.ADMITTED, State.WAITING, State.RELEASED),
    State.WAITING: (State.ADMITTED, State.RELEASED),
    State.ADMITTED: (State.CONNECTING, State.SENDING, State.RELEASED),
    # Back: nothing was sent, and another engine has the model. Counted anew if a bound was all there was.
    State.CONNECTING: (State.SENDING, State.COUNTED, State.COUNTING, State.RELEASED),
    # Back to connecting: a reused connection was closed by the engine while it was idle.
    State.SENDING: (State.STREAMING, State.CONNECTING, State.DRAINING, State.RELEASED),
    State.STREAMING: (State.DRAINING, State.RELEASED),
    State.DRAINING: (State.RELEASED,),
    State.RELEASED: (),
}
# fmt: on
