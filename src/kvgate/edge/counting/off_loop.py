"""Long prompts counted beside the event loop, so that no stream waits for them.

Promises: `count` answers once, on the loop's thread, unless it is cancelled first; at most `QUEUE_MAX` wait,
and what has no room, takes too long or ends the worker is `CannotCount`. Where the accelerator
releases Python's lock while it encodes, a thread does it; else a process of its own, which is started
when it is first needed, killed when it is stuck, and replaced when it has died.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import marshal
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

from kvgate.edge.counting.count_child import LENGTH_BYTES, packed, plain
from kvgate.edge.counting.counted import Counted
from kvgate.edge.counting.local_count import adds_special, count_parts, source_of
from kvgate.tokens import CannotCount, PromptCounter
from kvgate.wire.dialects.shape import RequestShape

QUEUE_MAX = 64
THREADS = 2
# A first start reads the tokenizer and builds tables: seconds for the largest vocabularies.
START_SECONDS = 30.0

Then: TypeAlias = Callable[[Counted | CannotCount], None]


class Job:
    """One count that is under way."""

    __slots__ = ("_then", "is_over", "parts")

    def __init__(self, parts: list[Any], then: Then) -> None:
        self.parts = parts
        self._then = then
        self.is_over = False

    def cancel(self) -> None:
        self.is_over = True

    def finish(self, outcome: Counted | CannotCount) -> None:
        if not self.is_over:
            self.is_over = True
            self._then(outcome)


class ThreadCounter:
    """Counts in threads of this process, with the counter (and the cache) of the loop."""

    def __init__(self, counter: PromptCounter, loop: asyncio.AbstractEventLoop) -> None:
        self._counter = counter
        self._loop = loop
        self._threads = ThreadPoolExecutor(THREADS, "kvgate-count")
        self.waiting = 0
        self.lost = 0

    def count(self, shape: RequestShape, seconds: float, then: Then) -> Job:
        """`then` gets the counts of the shape's parts within `seconds`."""
        job = Job([], then)
        if self.waiting >= QUEUE_MAX:
            self._loop.call_soon(job.finish, CannotCount("too many long prompts are being counted"))
            return job
        self.waiting += 1
        parts, special = shape.parts, adds_special(shape)
        timer = self._loop.call_later(seconds, job.finish, CannotCount(f"no count within {seconds:g} s"))

        def work() -> Counted | CannotCount:
            if job.is_over:
                return CannotCount("nobody waits for it")
            try:
                counts = count_parts(self._counter, parts, special)
            except CannotCount as error:
                return error
            return Counted(tuple(count.prompt_tokens for count in counts), source_of(counts))

        def over(done: asyncio.Future[Counted | CannotCount]) -> None:
            self.waiting -= 1
            timer.cancel()
            if done.cancelled():
                return
            error = done.exception()
            if error is not None:
                self.lost += 1
            job.finish(CannotCount(str(error)) if error is not None else done.result())

        self._loop.run_in_executor(self._threads, work).add_done_callback(over)
        return job

    async def stop(self) -> None:
        """As `close`."""
        self.close()

    def close(self) -> None:
        """Begin nothing more. A count that runs ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class ProcessCounter:
    """Counts in one child process, one prompt at a time."""

    def __init__(
        self, directory: str | Path, options: dict[str, Any], loop: asyncio.AbstractEventLoop
    ) -> None:
        """`options`: as `PromptCounter`'s, in types that JSON knows."""
        self._arguments = json.dumps({"directory": str(directory), "counter": options})
        self._loop = loop
        self._jobs: deque[tuple[Job, float]] = deque()
        self._turn: asyncio.Task[None] | None = None
        self._child: asyncio.subprocess.Process | None = None
        self.waiting = 0
        self.lost = 0  # children that died or had to be killed

    @property
    def pid(self) -> int | None:
        """The child's, while there is one."""
        return None if self._child is None else self._child.pid

    def count(self, shape: RequestShape, seconds: float, then: Then) -> Job:
        """`then` gets the counts of the shape's parts within `seconds` of its turn."""
        job = Job(plain(shape.parts, adds_special(shape)), then)
        if self.waiting >= QUEUE_MAX:
            self._loop.call_soon(job.finish, CannotCount("too many long prompts are being counted"))
            return job
        self.waiting += 1
        self._jobs.append((job, self._loop.time() + seconds))
        if self._turn is None:
            self._turn = self._loop.create_task(self._work())
        return job

    async def stop(self) -> None:
        """End the child. Nothing is answered any more."""
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.cancel()
            await asyncio.wait([turn])
        self._jobs.clear()
        await self._end_child()

    async def _work(self) -> None:
        while self._jobs:
            job, deadline = self._jobs.popleft()
            outcome: Counted | CannotCount
            try:
                if job.is_over:
                    continue
                outcome = await self._one(job, deadline)
            except (OSError, TimeoutError, EOFError, ValueError) as error:
                self.lost += 1
                await self._end_child()
                outcome = CannotCount(f"the counting process failed: {error or type(error).__name__}")
            finally:
                self.waiting -= 1
            job.finish(outcome)
        self._turn = None

    async def _one(self, job: Job, deadline: float) -> Counted | CannotCount:
        if self._child is None:
            self._child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kvgate.edge.counting.count_child", self._arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                # Ctrl-C in the terminal is for the parent, which counts while it drains.
                start_new_session=True,
            )
            # Started for this job: the start is not held against it.
            deadline = max(deadline, self._loop.time() + START_SECONDS)
        into, out = self._child.stdin, self._child.stdout
        assert into is not None
        assert out is not None
        async with asyncio.timeout_at(deadline):
            into.write(packed(job.parts))
            await into.drain()
            length = int.from_bytes(await out.readexactly(LENGTH_BYTES), "big")
            answer = marshal.loads(await out.readexactly(length))
        if isinstance(answer, str):
            return CannotCount(answer)
        tokens, source = answer
        return Counted(tuple(tokens), source)

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.communicate()  # to the end of its pipes, and until it is gone
