"""Prompt tokens of a request, from the best source that there is.

In this order: the request itself (token ids), the model's own tokenizer in this process, the engine's
counting endpoint, a bound. Promises: `at_once` never takes longer than a short prompt's count and asks
nobody; what takes longer is `begin`, answered once, on the loop's thread, within a bounded time, and
what is proven of such a prompt without counting it is `least` and `most`. The tokenizer is believed only
where it has agreed with the engine (`trust`).
"""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from typing import Any

from kvgate.edge.counting import uncounted
from kvgate.edge.counting.counted import Answer, Counted, Counting, CountRefused, Outcome, Prompts
from kvgate.edge.counting.engine_count import EngineCounts
from kvgate.edge.counting.local_count import count_shape, refuse_own_prompts, source_of
from kvgate.edge.counting.off_loop import ProcessCounter, Then, ThreadCounter
from kvgate.edge.counting.trust import Trust
from kvgate.edge.counting.waiting import Waiting
from kvgate.edge.relay.heads import Headers
from kvgate.edge.relay.pool import EnginePool
from kvgate.tokens import CannotCount, PromptCounter
from kvgate.wire.dialects.shape import Conversation, RequestShape
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
        self.calls = EngineCounts(pool, engine, timeout)
        self._tokenizer = tokenizer
        self._proofs = None if tokenizer is None else tokenizer.proofs
        self._beside: ThreadCounter | ProcessCounter | None = None
        self._loop = pool.loop
        can_ask = engine.count_text is not None or engine.count_chat is not None
        self.trust = Trust(can_ask=can_ask)
        self.sources: Tally[str] = Tally()
        self.beside = 0  # prompts that were counted off the loop
        self.on_bound = 0  # requests that were let in before they were counted
        self.settled = 0  # of those, how many were corrected by their count
        self.refused_uncounted = 0  # requests whose text alone showed that they can never fit

    @property
    def timeout(self) -> float:
        """Seconds within which a count is there, or is given up."""
        return self.calls.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.calls.timeout = seconds

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
        return self.told(found) if isinstance(found, Counted) else None

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

    def begin(self, shape: RequestShape, headers: Headers, peer: bytes, answer: Answer) -> Counted | Waiting:
        """The counts, where they are there or were asked for lately; else `answer` gets them, and
        cancelling what is returned stops that."""
        found = self._look(shape)
        if isinstance(found, Counted):
            return self.told(found)
        waiting = Waiting(self, shape, headers, peer, answer)
        if found is None:
            waiting.now = waiting.beside()
            return waiting
        counting = self.calls.begin(found, headers, peer, waiting.from_engine)
        if isinstance(counting, Counted):
            return self.told(counting)
        waiting.now = counting
        return waiting

    def begin_beside(self, shape: RequestShape, then: Then) -> Counting:
        """Count here, off the loop."""
        self.beside += 1
        return self._counter_beside().count(shape, self.timeout, then)

    def least_at_best(self, shape: RequestShape) -> Prompts | None:
        """What `least` could prove at best, for no more than a look at the length; None: nothing."""
        proofs = self._proofs
        if proofs is None or not self._is_ours(shape) or not self.trust.holds(shape.is_chat):
            return None
        return None if uncounted.is_cut(shape) else uncounted.least_at_best(proofs, shape)

    def least(self, shape: RequestShape, enough: int) -> Prompts | None:
        """Each prompt has at least so many tokens; not looked at further than `enough` of them need.
        None: nothing is proven."""
        proofs = self._proofs
        return uncounted.least_of(proofs, shape, enough) if proofs and self._goes_beside(shape) else None

    def most(self, shape: RequestShape, *, is_beside: bool) -> Prompts | None:
        """Each prompt has at most so many tokens; None: nothing is proven. `is_beside`: it was found
        that it can be counted here."""
        proofs = self._proofs
        if proofs is None or not self._is_ours(shape) or not self.trust.holds(shape.is_chat):
            return None
        if not is_beside and (shape.is_chat or any(isinstance(part, Conversation) for part in shape.parts)):
            return None  # the engine words it by itself
        return uncounted.most_of(proofs, shape)

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
        calls, tokenizer, beside = self.calls, self._tokenizer, self._beside
        shown: dict[str, Any] = {
            "sources": dict(self.sources),
            "beside": self.beside,
            "beside_waiting": 0 if beside is None else beside.waiting,
            "beside_lost": 0 if beside is None else beside.lost,
            "on_bound": self.on_bound,
            "settled": self.settled,
            "refused_uncounted": self.refused_uncounted,
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

    def told(self, counted: Counted) -> Counted:
        """Note where a request's count came from."""
        self.sources[counted.source] += 1
        return counted

    def admitted_on_bound(self) -> None:
        """Note that a request goes on before it is counted."""
        self.on_bound += 1
        self.sources["bound"] += 1


def _settle(future: asyncio.Future[Outcome], outcome: Outcome) -> None:
    if not future.done():
        future.set_result(outcome)
