"""One request on its way in and out of a turnstile: asks, waits, owns, gives back.

Promises: between being granted and owning lies no await, nor in giving back, so that a cancellation
can come only where there is a seat to leave or a ticket to close; `close` is right at any moment and
changes nothing when it is called again.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Generic, NamedTuple, TypeVar

from kvgate.core.records import Ask, Ending, Granted, Misuse, Refused, Seconds
from kvgate.edge.library.bells import AsyncBell, Bell, ThreadBell, async_bell
from kvgate.edge.library.ticket import AdmissionRefused, Ticket, ending_of
from kvgate.edge.library.turnstile import Seat, Turnstile

B = TypeVar("B", bound=Bell)


class Entry(NamedTuple):
    """Where to ask, and what holds for all who do."""

    turnstile: Turnstile
    abort_grace: Seconds
    busy_status: int


class _Admitting(Generic[B]):
    """Entered once."""

    def __init__(self, entry: Entry, ask: Ask) -> None:
        self._entry = entry
        self._ask = ask
        self._seat: Seat[B] | None = None
        self._is_entered = False
        self.ticket: Ticket | None = None

    def _begin(self, make_bell: Callable[[], B]) -> Ticket | None:
        """The ticket, or None where there is a seat to wait in. Raises `AdmissionRefused`."""
        if self._is_entered:
            raise Misuse("an admission is entered once; call admit() again for the next request")
        self._is_entered = True
        given = self._entry.turnstile.ask(self._ask, make_bell)
        if not isinstance(given, Seat):
            return self._take(given)
        self._seat = given
        return None

    def close(self, ending: Ending) -> None:
        """Give up the seat or the ticket, whichever there is. Closing again changes nothing."""
        seat, self._seat = self._seat, None
        if seat is not None:
            self._entry.turnstile.leave(seat)
        if self.ticket is not None:
            self.ticket.close(ending)

    def _take(self, given: Granted | Refused) -> Ticket:
        self._seat = None
        if isinstance(given, Refused):
            raise AdmissionRefused(given, busy_status=self._entry.busy_status)
        self.ticket = Ticket(self._entry.turnstile, self._ask, given, self._entry.abort_grace)
        return self.ticket


class AsyncAdmitting(_Admitting[AsyncBell]):
    """What `Admission.admit` returns: an asynchronous context manager."""

    def begin(self) -> Ticket | None:
        """The ticket, or None where there is a line: then await `seated`. Raises `AdmissionRefused`.

        Whoever calls this, and not `async with`, must `close` in the end.
        """
        return self._begin(async_bell)

    async def seated(self) -> Ticket:
        """The ticket, as soon as there is room. Raises `AdmissionRefused`."""
        try:
            while (seat := self._seat) is not None:
                given = self._entry.turnstile.look(seat)
                if not isinstance(given, float):
                    return self._take(given)
                await seat.bell.wait(given)
        except BaseException:
            self.close(Ending.CANCELLED)
            raise
        raise Misuse("the admission was closed while it waited")

    async def __aenter__(self) -> Ticket:
        return self.begin() or await self.seated()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(ending_of(error))


class ThreadAdmitting(_Admitting[ThreadBell]):
    """What `ThreadAdmission.admit` returns: a context manager."""

    def __enter__(self) -> Ticket:
        ticket = self._begin(ThreadBell)
        if ticket is not None:
            return ticket
        try:
            while (seat := self._seat) is not None:
                given = self._entry.turnstile.look(seat)
                if not isinstance(given, float):
                    return self._take(given)
                seat.bell.wait(given)
        except BaseException:
            self.close(Ending.CANCELLED)
            raise
        raise Misuse("the admission was closed while it waited")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(ending_of(error))
