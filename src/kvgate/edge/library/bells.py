"""How one who waits is woken, whatever it waits in: a thread, asyncio or trio (and so anyio).

Promises: `ring` may be called from any thread, never blocks, and says False where nobody can hear it
any more; a ring is never lost between two waits. No package is needed: trio is used only inside a
program that runs it. (anyio's own Event cannot be set from another thread without blocking, which a
gate shared by threads and loops must do under its lock.)
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Bell(Protocol):
    """What can be rung."""

    def ring(self) -> bool: ...


class AsyncBell(Bell, Protocol):
    """A bell that a task waits for, `seconds` at most; a wait may end without a ring."""

    async def wait(self, seconds: float) -> None: ...


class ThreadBell:
    """For a thread that waits."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def ring(self) -> bool:
        self._event.set()
        return True

    def wait(self, seconds: float) -> None:
        self._event.wait(max(0.0, seconds))
        self._event.clear()


class AsyncioBell:
    """For a task of the running asyncio loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._event = asyncio.Event()

    def ring(self) -> bool:
        if self._loop.is_closed():
            return False
        if threading.get_ident() == self._thread:
            self._event.set()
            return True
        try:
            self._loop.call_soon_threadsafe(self._event.set)
        except RuntimeError:  # closed in this instant
            return False
        return True

    async def wait(self, seconds: float) -> None:
        timer = self._loop.call_later(max(0.0, seconds), self._event.set)
        try:
            await self._event.wait()
        finally:
            timer.cancel()
        self._event.clear()


class TrioBell:
    """For a task of the running trio program."""

    def __init__(self) -> None:
        import trio

        self._trio = trio
        self._token = trio.lowlevel.current_trio_token()
        self._event = trio.Event()

    def ring(self) -> bool:
        try:
            self._token.run_sync_soon(self._set)
        except self._trio.RunFinishedError:
            return False
        return True

    def _set(self) -> None:
        self._event.set()

    async def wait(self, seconds: float) -> None:
        with self._trio.move_on_after(max(0.0, seconds)):
            await self._event.wait()
        if self._event.is_set():
            self._event = self._trio.Event()


def is_in_trio() -> bool:
    """True inside a trio task, also where trio is a guest of another loop."""
    trio = sys.modules.get("trio")
    return trio is not None and bool(trio.lowlevel.in_trio_task())


def async_bell() -> AsyncBell:
    """A bell for the task that calls. Raises `RuntimeError` outside of asyncio and trio."""
    return TrioBell() if is_in_trio() else AsyncioBell()


async def in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """The result of `work` run in a thread of the loop that is running."""
    if is_in_trio():
        import trio

        return await trio.to_thread.run_sync(work, *arguments)
    return await asyncio.to_thread(work, *arguments)


async def unless(is_off: Callable[[], Awaitable[None]], work: Callable[[], Awaitable[None]]) -> bool:
    """Run `work` beside `is_off`: True when it is done, False where `is_off` returned first.

    The one that is late is cancelled. What `work` raises is raised here.
    """
    return await (_unless_trio if is_in_trio() else _unless_asyncio)(is_off, work)


async def _unless_asyncio(is_off: Callable[[], Awaitable[None]], work: Callable[[], Awaitable[None]]) -> bool:
    worker, watcher = asyncio.ensure_future(work()), asyncio.ensure_future(is_off())
    tasks = (worker, watcher)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        is_done = worker.done()
    finally:
        for task in tasks:
            task.cancel()
        # Cancelled once more, we do not wait: both have been told, and end by themselves.
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()
    return is_done


async def _unless_trio(is_off: Callable[[], Awaitable[None]], work: Callable[[], Awaitable[None]]) -> bool:
    import trio

    raised: list[Exception] = []
    is_done = False

    async def watch() -> None:
        await is_off()
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        try:
            await work()
            is_done = True
        except Exception as error:  # out of the nursery it would come in a group
            raised.append(error)
        nursery.cancel_scope.cancel()
    if raised:
        raise raised[0]
    return is_done
