"""A count under way: beside the loop, and where that fails, at the engine.

Promises: the answer comes once, on the loop's thread, not before `begin` has returned and not after
`cancel`. A request that was let in on a bound meanwhile (`is_settling`) gets it too, but nothing is asked
of the engine for it that was not asked already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgate.edge.counting.counted import Answer, Counted, Counting, Outcome, Prompts
from kvgate.edge.relay.heads import Headers
from kvgate.edge.relay.pool import EngineUnavailable
from kvgate.tokens import CannotCount
from kvgate.wire.dialects.shape import RequestShape

if TYPE_CHECKING:
    from kvgate.edge.counting.counter import Counter


class Waiting:
    """What `Counter.begin` gives to those who have to wait.

    `is_beside`: it is counted here. `is_settling`: its request goes on meanwhile, and is corrected by it.
    """

    __slots__ = ("_answer", "_counter", "_headers", "_peer", "_shape", "is_beside", "is_settling", "now")

    now: Counting | None

    def __init__(
        self, counter: Counter, shape: RequestShape, headers: Headers, peer: bytes, answer: Answer
    ) -> None:
        self._counter = counter
        self._shape = shape
        self._headers = headers
        self._peer = peer
        self._answer = answer
        self.is_beside = False
        self.is_settling = False

    def most(self) -> Prompts | None:
        """At most so many tokens has each prompt, where that is proven."""
        return self._counter.most(self._shape, is_beside=self.is_beside)

    def beside(self) -> Counting:
        self.is_beside = True
        return self._counter.begin_beside(self._shape, self._from_beside)

    def engine(self) -> None:
        """It could not be counted here after all."""
        counter = self._counter
        plan = counter.plan(self._shape)
        if plan.is_whole_context:
            self._finish(Counted(None, "whole_context"))
            return
        counting = counter.calls.begin(plan, self._headers, self._peer, self.from_engine)
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
        elif self.is_settling:
            self._finish(EngineUnavailable(str(outcome)))
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
        if isinstance(outcome, Counted) and not self.is_settling:
            self._counter.told(outcome)
        self._answer(outcome)
