"""Drives one `Gate` from an event loop: reads the clock, arms the timer, delivers late answers.

Promises: the callback given to `ask` is called exactly once, unless `leave` comes first; a grant
that nobody receives is ended here, never dropped. Everything runs on the loop's thread, and there
is no await between looking and taking.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeAlias

from kvgate.core.gate import Gate
from kvgate.core.records import Ask, Ending, Granted, Key, PoolFacts, Queued, Refused
from kvgate.edge import clock

Answer: TypeAlias = Callable[[Granted | Refused], None]
InFull: TypeAlias = Callable[[Ask], Ask]
"""Adds to a question what only matters to those who are not let in at once."""
GoesTo: TypeAlias = Callable[["Gatekeeper"], bool]
"""Takes a waiting request to another pool, if that lets it in at once; True if it has."""


class Gatekeeper:
    """The one owner of a `Gate` in a running loop."""

    def __init__(self, gate: Gate, loop: asyncio.AbstractEventLoop) -> None:
        self.gate = gate
        self._loop = loop
        self._waiting: dict[Key, tuple[Answer, GoesTo | None]] = {}
        self.on_room: Callable[[], None] | None = None  # called when there may be room for others' waiters
        self.has_failed = False  # the last request that ended, and was not cancelled
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self.lingering = 0  # ended for the client, not yet let go by the engine

    def ask(
        self, ask: Ask, answer: Answer, in_full: InFull | None = None, goes_to: GoesTo | None = None
    ) -> Key | None:
        """Calls `answer` now, or later; in the second case returns the key of the place in the line.

        A `Granted` passes ownership of the reservation to whoever `answer` belongs to.
        """
        now = clock.now()
        given: Granted | Queued | Refused | None = self.gate.at_once(ask, now)
        if given is None:
            given = self.gate.ask(ask if in_full is None else in_full(ask), now)
        if isinstance(given, Queued):
            self._waiting[given.key] = answer, goes_to
            self._arm()
            return given.key
        answer(given)
        return None

    def at_once(self, ask: Ask) -> Granted | None:
        """A grant, where nobody waits and it does not matter who asks. The caller owns the reservation."""
        return self.gate.at_once(ask, clock.now())

    def take(self, ask: Ask, in_full: InFull) -> Granted | None:
        """A grant, if there is room now; else nothing happens. The caller owns the reservation."""
        return self.gate.take(in_full(ask), clock.now())

    def move(self, key: Key, other: Gatekeeper) -> bool:
        """Whether a waiting request has gone to another pool, which has room."""
        waiting = self._waiting.get(key)
        return waiting is not None and waiting[1] is not None and waiting[1](other)

    def settle(self, key: Key, blocks: int) -> None:
        """Correct a live reservation downwards: those who wait get what comes free."""
        self._deliver(self.gate.settle(key, blocks, clock.now()))

    def leave(self, key: Key) -> None:
        """A waiting request has gone. Its `answer` will not be called."""
        if self._waiting.pop(key, None) is not None:
            self._deliver(self.gate.ended(key, Ending.CANCELLED, clock.now()))

    def ended(
        self, key: Key, ending: Ending, after: float = 0.0, then: Callable[[], None] | None = None
    ) -> None:
        """End a reservation, `after` seconds from now (the engine's abort grace); `then` hears of it
        where it was not at once."""
        if ending is not Ending.CANCELLED:
            self.has_failed = ending is Ending.FAILED
        if after > 0:
            self.lingering += 1
            self._loop.call_later(after, self._end_lingering, key, ending, then)
        else:
            self._deliver(self.gate.ended(key, ending, clock.now()))

    def resize(self, facts: PoolFacts) -> None:
        """The engine has other sizes now."""
        self._deliver(self.gate.resize(facts, clock.now()))

    def _end_lingering(self, key: Key, ending: Ending, then: Callable[[], None] | None) -> None:
        self.lingering -= 1
        if then is not None:
            then()
        self._deliver(self.gate.ended(key, ending, clock.now()))

    def _deliver(self, answers: Iterable[Granted | Refused]) -> None:
        failure: BaseException | None = None
        for given in answers:
            waiting = self._waiting.pop(given.key, None) if given.key is not None else None
            try:
                if waiting is not None:
                    waiting[0](given)
                elif isinstance(given, Granted):
                    self.ended(given.key, Ending.CANCELLED)
            except Exception as error:  # one that cannot take its answer must not keep the others from theirs
                failure = error
        self._arm()
        if self.on_room is not None and not self.has_failed:
            self.on_room()
        if failure is not None:
            raise failure

    def _arm(self) -> None:
        if not self._waiting and self._timer is None:
            return
        at = self.gate.wake_at()
        if at == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = at
        if at is not None:
            self._timer = self._loop.call_later(max(0.0, at - clock.now()), self._tick)

    def _tick(self) -> None:
        self._timer = self._timer_at = None
        self._deliver(self.gate.tick(clock.now()))
