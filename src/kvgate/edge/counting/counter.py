"""Prompt tokens of a request, from the best source that there is.

In this order: the request itself (token ids), the model's own tokenizer in this process, the engine's
counting endpoint, a bound. Promises: `at_once` never takes longer than a short prompt's count and asks
nobody; what takes longer is `begin`, answered once, on the loop's thread, within a bounded time. The
tokenizer is believed only where it has agreed with the engine (`trust`).
"""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from typing import Any

from kvgate.edge.counting.counted import Answer, Counted, Counting, CountRefused, Outcome
from kvgate.edge.counting.engine_count import EngineCounts
from kvgate.edge.counting.local_count import count_shape, refuse_own_prompts, source_of
from kvgate.edge.counting.off_loop import ProcessCounter, ThreadCounter
from kvgate.edge.counting.trust import Trust
from kvgate.edge.relay.heads import Headers
from kvgate.edge.relay.pool import EnginePool
from kvgate.tokens import CannotCount, PromptCounter
from kvgate.wire.dialects.shape import RequestShape
from kvgate.wire.engines import CountPlan, Engine

__all__ = ["CountRefused", "Counted", "Counter"]


class Counter:
    """Counts the prompts of one engine's requests. `tokenizer`: the model's, where it is at hand."""

    def __init__(
        self,
        pool: EnginePool,
        engine: Engine,
        timeout: float,
        tokenizer: PromptCounter | None = None,
    ) -> None:
        self._engine = engine
        self._calls = EngineCounts(pool, engine, timeout)
        self._tokenizer = tokenizer
        self._beside: ThreadCounter | ProcessCounter | None = None
        self._loop = pool.loop
        can_ask = engine.count_text is not None or engine.count_chat is not None
        self.trust = Trust(can_ask=can_ask)
        self.sources: Tally[str] = Tally()
        self.beside = 0  # prompts that were counted off the loop

    @property
    def timeout(self) -> float:
        """Seconds within which a count is there, or is given up."""
        return self._calls.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._calls.timeout = seconds

    def plan(self, shape: RequestShape) -> CountPlan:
        """What would be asked of the engine, and what is known without asking."""
        return self._engine.plan(shape)

    def local(self, shape: RequestShape) -> Counted | None:
        """The tokenizer's own counts of short prompts; None where it has none, or they are long."""
        tokenizer = self._tokenizer
        if tokenizer is None or not self._is_ours(shape) or tokenizer.is_long(len(shape.body.text)):
            return None
        try:
            refuse_own_prompts(self._engine.name, shape, tokenizer)
            counts = count_shape(tokenizer, shape)
        except CannotCount:
            return None
        return Counted(tuple(count.prompt_tokens for count in counts), source_of(counts))

    def at_once(self, shape: RequestShape) -> Counted | None:
        """The counts, where nobody has to be asked or waited for."""
        found = self._look(shape)
        return self._told(found) if isinstance(found, Counted) else None

    def _look(self, shape: RequestShape) -> Counted | CountPlan | None:
        """The counts, or what has to be asked of the engine for them; None: they are made beside."""
        counted = self.local(shape)
        if counted is not None and (counted.source == "request" or self.trust.holds(shape.is_chat)):
            return counted
        if self._goes_beside(shape):
            return None
        plan = self._engine.plan(shape)
        # Where the engine cannot be asked, it cannot contradict either.
        if plan.is_whole_context:
            return counted or Counted(None, "whole_context")
        known = plan.known
        return plan if known is None else counted or Counted(known, plan.source)

    def begin(self, shape: RequestShape, headers: Headers, peer: bytes, answer: Answer) -> Counted | Counting:
        """The counts, where they are there or were asked for lately; else `answer` gets them, and
        cancelling what is returned stops that."""
        found = self._look(shape)
        if isinstance(found, Counted):
            return self._told(found)
        waiting = _Waiting(self, shape, headers, peer, answer)
        if found is None:
            waiting.now = waiting.beside()
            return waiting
        counting = self._calls.begin(found, headers, peer, waiting.from_engine)
        if isinstance(counting, Counted):
            return self._told(counting)
        waiting.now = counting
        return waiting

    async def of(self, shape: RequestShape, headers: Headers, peer: bytes) -> Counted:
        """The counts, however they are got. Raises `EngineUnavailable` or `CountRefused`."""
        future: asyncio.Future[Outcome] = self._loop.create_future()
        counting = self.begin(shape, headers, peer, lambda outcome: _settle(future, outcome))
        if isinstance(counting, Counted):
            return counting
        try:
            outcome = await future
        except asyncio.CancelledError:
            counting.cancel()
            raise
        if not isinstance(outcome, Counted):
            raise outcome
        return outcome

    async def stop(self) -> None:
        """End the process or the threads that count beside the loop."""
        if self._beside is not None:
            await self._beside.stop()

    def snapshot(self) -> dict[str, Any]:
        """Plain values for `/status` and `/metrics`."""
        calls, tokenizer, beside = self._calls, self._tokenizer, self._beside
        shown: dict[str, Any] = {
            "sources": dict(self.sources),
            "beside": self.beside,
            "beside_waiting": 0 if beside is None else beside.waiting,
            "beside_lost": 0 if beside is None else beside.lost,
            "engine_calls": calls.calls,
            "engine_waiting": calls.waiting,
            "engine_remembered": calls.cache.hits,
        }
        if tokenizer is not None:
            cache = tokenizer.cache
            shown |= {
                "counted_by": tokenizer.counted_by,
                "distrusted": self.trust.why,
                "accelerators_dropped": len(tokenizer.dropped),
                "cache_hits": cache.hits,
                "cache_misses": cache.misses,
                "cache_bytes": cache.bytes_held,
            }
        return shown

    def _is_ours(self, shape: RequestShape) -> bool:
        """Whether a count would be used: the engine's slots, or what it hides, may decide the price."""
        return not (
            self._engine.is_partitioned or shape.priced_as_whole_context or self.trust.is_lost(shape.is_chat)
        )

    def _goes_beside(self, shape: RequestShape) -> bool:
        tokenizer = self._tokenizer
        if tokenizer is None or not self._is_ours(shape) or not tokenizer.is_long(len(shape.body.text)):
            return False
        if not self.trust.holds(shape.is_chat):
            return False
        try:
            refuse_own_prompts(self._engine.name, shape, tokenizer)
        except CannotCount:
            return False
        return True

    def _counter_beside(self) -> ThreadCounter | ProcessCounter:
        tokenizer = self._tokenizer
        assert tokenizer is not None
        # An accelerator may be dropped while running; from then on the lock would be held.
        wanted = ThreadCounter if tokenizer.releases_lock else ProcessCounter
        if not isinstance(self._beside, wanted):
            if isinstance(self._beside, ThreadCounter):
                self._beside.close()
            self._beside = (
                ThreadCounter(tokenizer, self._loop)
                if tokenizer.releases_lock
                else ProcessCounter(tokenizer.directory, tokenizer.options, self._loop)
            )
        return self._beside

    def _told(self, counted: Counted) -> Counted:
        self.sources[counted.source] += 1
        return counted


class _Waiting:
    """A count under way: beside the loop, and where that fails, at the engine."""

    __slots__ = ("_answer", "_counter", "_headers", "_peer", "_shape", "now")

    now: Counting | None

    def __init__(
        self, counter: Counter, shape: RequestShape, headers: Headers, peer: bytes, answer: Answer
    ) -> None:
        self._counter = counter
        self._shape = shape
        self._headers = headers
        self._peer = peer
        self._answer = answer

    def beside(self) -> Counting:
        counter = self._counter
        counter.beside += 1
        return counter._counter_beside().count(self._shape, counter.timeout, self._from_beside)

    def engine(self) -> None:
        """It could not be counted here after all."""
        counter = self._counter
        plan = counter.plan(self._shape)
        if plan.is_whole_context:
            self._finish(Counted(None, "whole_context"))
            return
        counting = counter._calls.begin(plan, self._headers, self._peer, self.from_engine)
        if isinstance(counting, Counted):
            self._finish(counting)
        else:
            self.now = counting

    def cancel(self) -> None:
        if self.now is not None:
            self.now.cancel()

    def _from_beside(self, outcome: Counted | CannotCount) -> None:
        if isinstance(outcome, Counted):
            self._finish(outcome)
        else:
            self.now = None
            self.engine()

    def from_engine(self, outcome: Outcome) -> None:
        ours = self._counter.local(self._shape)
        if ours is not None and isinstance(outcome, Counted):
            self._counter.trust.compare(self._shape.is_chat, ours, outcome)
        self._finish(outcome)

    def _finish(self, outcome: Outcome) -> None:
        self.now = None  # it knows us: a circle that only the collector would open
        if isinstance(outcome, Counted):
            self._counter._told(outcome)
        self._answer(outcome)


def _settle(future: asyncio.Future[Outcome], outcome: Outcome) -> None:
    if not future.done():
        future.set_result(outcome)
