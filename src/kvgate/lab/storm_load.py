"""Send a planned storm and follow every request to its end, each client in its own manner.

Promises: bounded by the plan and by `Load.stop`, after which everything is over within moments and the
figures so far are right; a client reports what it saw, not what the server says of itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from kvgate.lab.sse_client import Answer, Cut, post
from kvgate.lab.storm import Outcome, StreamResult, TokenReader, message_of, retry_after
from kvgate.lab.storm_plan import Arrivals, Client, Planned

SDK_TRIES = 3
SDK_LONGEST = 60.0  # older versions ignore a longer Retry-After and come back at once
STUBBORN_WAIT = (0.1, 0.3)
PATIENCE = 10.0  # seconds to the first token, of a client that gives up
PROGRESS_EVERY = 0.2


@dataclass(slots=True)
class Follow:
    """One request as its client saw it. Times in seconds from the start of the storm."""

    planned: Planned
    stream: StreamResult = field(default_factory=StreamResult)
    asked: float | None = None
    admitted: float | None = None  # when the try that got in began
    server_wait: float = 0.0  # what the gate says that this try stood in its line
    retries: list[float] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    @property
    def wait(self) -> float | None:
        """From the first question to the admission; None where it never got in."""
        if self.admitted is None or self.asked is None:
            return None
        return self.admitted - self.asked + self.server_wait


@dataclass(slots=True)
class Load:
    """A storm under way, and what became of it."""

    url: str
    follows: list[Follow]
    arrivals: Arrivals
    concurrency: int = 16
    model: str | None = None
    ignore_eos: bool = False
    keys: tuple[str, ...] = ()
    patience: float = 120.0  # seconds after which a client that is still refused goes
    grace: float = 30.0  # after the last second, for what runs
    seconds: float = 60.0
    elapsed: float = 0.0
    was_stopped: bool = False
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _began: float = 0.0

    def stop(self) -> None:
        """End it now; what runs is cut and counted as left."""
        self.was_stopped = True
        self._stop.set()

    async def run(self, progress: Callable[[Load], None] | None = None, *, seed: int = 1) -> None:
        """Send everything. Returns when all is over, or soon after `stop`."""
        self._began = time.perf_counter()
        rng = Random(seed)
        work = asyncio.create_task(self._closed(rng) if self.arrivals is Arrivals.CLOSED else self._open(rng))
        stopped = asyncio.create_task(self._stop.wait())
        try:
            async with asyncio.timeout(self.seconds + self.grace):
                while not work.done() and not stopped.done():
                    await asyncio.wait({work, stopped}, timeout=PROGRESS_EVERY, return_when="FIRST_COMPLETED")
                    self._tell(progress)
        except TimeoutError:
            self.was_stopped = True
        finally:
            for task in (work, stopped):
                task.cancel()
            await asyncio.gather(work, stopped, return_exceptions=True)
            for follow in self.follows:
                if follow.stream.outcome is Outcome.RUNNING and follow.asked is not None:
                    follow.stream.outcome, follow.stream.detail = Outcome.LEFT, "the storm was over"
            self._tell(progress)
        if not work.cancelled() and (error := work.exception()) is not None:
            raise error

    @property
    def now(self) -> float:
        return time.perf_counter() - self._began

    def outcomes(self) -> Counter[Outcome]:
        return Counter(f.stream.outcome for f in self.follows if f.asked is not None)

    def _tell(self, progress: Callable[[Load], None] | None) -> None:
        self.elapsed = self.now
        if progress is not None:
            progress(self)

    async def _closed(self, rng: Random) -> None:
        left = iter(self.follows)

        async def worker() -> None:
            for follow in left:
                if self.now > self.seconds:
                    return
                await self._follow(follow, rng)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(self.concurrency, len(self.follows))):
                group.create_task(worker())

    async def _open(self, rng: Random) -> None:
        async with asyncio.TaskGroup() as group:
            for follow in self.follows:
                await asyncio.sleep(max(0.0, follow.planned.at - self.now))
                group.create_task(self._follow(follow, rng))

    async def _follow(self, follow: Follow, rng: Random) -> None:
        planned, stream = follow.planned, follow.stream
        follow.asked = self.now
        body = planned.body(model=self.model, ignore_eos=self.ignore_eos)
        headers = {"Idempotency-Key": f"storm-{self._began}-{planned.number}"}
        if self.keys:
            headers["Authorization"] = f"Bearer {self.keys[planned.key]}"
        while True:
            began, reader = self.now, TokenReader(stream)
            if stream.retries:
                headers["x-stainless-retry-count"] = str(stream.retries)
            try:
                answer = await self._ask(planned, body, headers, reader)
            except TimeoutError:
                stream.outcome, stream.detail = Outcome.LEFT, f"no token within {PATIENCE:g} s"
                return
            except (Cut, OSError) as error:
                stream.outcome, stream.detail = Outcome.DIED, f"cut: {error}"
                return
            if answer.status == 200:
                follow.admitted = began
                with contextlib.suppress(ValueError):
                    follow.server_wait = float(answer.headers.get("x-kvgate-wait-ms", "0")) / 1000
                stream.outcome, stream.detail = reader.verdict()
                stream.seconds = self.now - follow.asked
                return
            if answer.status >= 500 and answer.status not in (503, 529):
                # The engine had taken it and failed before the first token.
                stream.outcome, stream.detail = Outcome.DIED, f"{answer.status}: {message_of(answer)}"
                return
            stream.refusals += 1
            follow.reasons.append(answer.headers.get("x-kvgate-reason", str(answer.status)))
            wait = comes_back_in(planned.client, answer, stream.refusals, rng)
            if wait is None or self.now + wait > follow.asked + self.patience:
                stream.outcome, stream.detail = Outcome.REFUSED, f"{answer.status}: {message_of(answer)}"
                return
            await asyncio.sleep(wait)
            stream.retries += 1
            follow.retries.append(self.now)

    async def _ask(
        self, planned: Planned, body: bytes, headers: dict[str, str], reader: TokenReader
    ) -> Answer:
        if planned.client is not Client.GIVING_UP:
            return await post(self.url, body, reader.event, headers)
        first = asyncio.Event()

        def event(data: bytes) -> None:
            first.set()
            reader.event(data)

        asking = asyncio.create_task(post(self.url, body, event, headers))
        coming = asyncio.create_task(first.wait())
        try:
            await asyncio.wait({asking, coming}, timeout=PATIENCE, return_when="FIRST_COMPLETED")
            if not asking.done() and not coming.done():
                raise TimeoutError
            return await asking
        finally:
            for task in (asking, coming):
                task.cancel()


def comes_back_in(client: Client, answer: Answer, refusals: int, rng: Random) -> float | None:
    """Seconds until this kind of client tries again; None: it goes."""
    told = retry_after(answer)
    can_succeed = answer.status in (429, 503, 529) and answer.headers.get("x-should-retry") != "false"
    if client is Client.GIVING_UP or not can_succeed:
        return None
    if client is Client.STUBBORN:
        return rng.uniform(*STUBBORN_WAIT)
    if client is Client.SDK and refusals >= SDK_TRIES:
        return None
    if told is not None and (client is Client.OBEYING or 0 < told <= SDK_LONGEST):
        return told
    return float(min(0.5 * 2 ** (refusals - 1), 8.0) * (1 - 0.25 * rng.random()))


def loads(planned: Sequence[Planned]) -> list[Follow]:
    return [Follow(each) for each in planned]
