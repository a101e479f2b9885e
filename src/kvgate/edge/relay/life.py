"""The state of one request and the reservation that it holds.

Promises: `_to` is the only way from state to state, along `state.NEXT`; `_end` gives the reservation
back once, whatever happens, and tells the observers; a second call changes nothing. What is held does not
change before that, but for `_settle`, once, down to the exact count. It knows nothing of HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgate.core.bound_first import settled_blocks
from kvgate.core.records import Ask, Ending, Granted, Key, Misuse, PoolFacts
from kvgate.edge import clock
from kvgate.edge.counting.counted import Counted, Counting
from kvgate.edge.relay.finished import Finished
from kvgate.edge.relay.host import Host
from kvgate.edge.relay.state import NEXT, State

if TYPE_CHECKING:
    from kvgate.wire.sse import Usage


@dataclass(frozen=True, slots=True)
class OnBound:
    """What was asked and granted while only a bound of the prompts was known, of a pool of `facts`."""

    ask: Ask
    given: Granted
    facts: PoolFacts


class Life:
    """From `RECEIVED` to `RELEASED`."""

    # fmt: off
    __slots__ = (
        "_bound", "_count_source", "_counted_prompt", "_counting", "_gateway", "_is_priced", "_key",
        "_priced_tokens", "_reserved_tokens", "_started", "_tenant", "_upstream", "_wait", "state",
    )
    # fmt: on

    def __init__(self, gateway: Host) -> None:
        self._gateway = gateway
        self._upstream = gateway.upstreams[0]  # until one is chosen
        self.state = State.RECEIVED
        self._is_priced = False
        self._key: Key | None = None
        self._wait = 0.0
        self._counting: Counting | None = None  # under way
        self._bound: OnBound | None = None  # its prompts are not counted yet
        self._count_source = ""
        self._counted_prompt: int | None = None
        self._priced_tokens: int | None = None
        self._reserved_tokens: int | None = None
        self._started = clock.now()
        self._tenant = ""  # its name, once it is known

    @property
    def is_over(self) -> bool:
        """Answered, or given up; the reservation may still wait for the engine."""
        return self.state is State.DRAINING or self.state is State.RELEASED

    def _to(self, state: State) -> None:
        if state not in NEXT[self.state]:
            raise Misuse(f"a request cannot go from {self.state.value} to {state.value}")
        self.state = state

    def _hold(self, given: Granted, ask: Ask, *, is_counted: bool) -> None:
        """From here on the reservation is this request's. `is_counted`: the prompts of `ask` are
        counts, and not what makes a whole context."""
        self._key = given.key
        self._wait += given.waited
        self._to(State.ADMITTED)
        facts = self._upstream.facts
        cap, context = given.output_cap, facts.context
        self._counted_prompt = sum(ask.prompts) if is_counted else None
        self._priced_tokens = ask.choices * sum([min(prompt + cap, context) for prompt in ask.prompts])
        self._reserved_tokens = given.blocks * facts.block_size

    def _settle(self, counted: Counted) -> bool:
        """The count has come of prompts that were let in on a bound: give back what they do not need.

        False where the bound stays.
        """
        bound, key, prompts = self._bound, self._key, counted.prompts
        if bound is None or key is None or prompts is None:
            return False
        upstream, most, facts = self._upstream, bound.ask.prompts, bound.facts
        if any(count > at_most for count, at_most in zip(prompts, most, strict=True)):
            # What was promised to others cannot be taken back: it keeps what it has.
            upstream.counter.trust.above_bound(sum(most), sum(prompts))
            return False
        self._bound = None
        self._count_source = counted.source
        cap, held = bound.given.output_cap, bound.given.blocks
        blocks = settled_blocks(upstream.gate, bound.ask, prompts, held, facts)
        self._counted_prompt = sum(prompts)
        self._priced_tokens = bound.ask.choices * sum([prompt + cap for prompt in prompts])
        self._reserved_tokens = blocks * facts.block_size
        upstream.counter.settled += 1
        upstream.keeper.settle(key, blocks)
        return True

    def _end(
        self, ending: Ending, *, after: float = 0.0, outcome: str | None = None, usage: Usage | None = None
    ) -> None:
        """Give the reservation back, `after` seconds from now (the engine's abort grace)."""
        if self.is_over:
            return
        if self._counting is not None:
            self._counting.cancel()
            self._counting = None
        key, self._key = self._key, None
        if key is None:
            self._to(State.RELEASED)
        elif after > 0:
            self._to(State.DRAINING)
            self._upstream.keeper.ended(key, ending, after, self._let_go)
        else:
            self._to(State.RELEASED)
            self._upstream.keeper.ended(key, ending)
        if self._is_priced:
            self._tell(outcome or ending, usage)

    def _let_go(self) -> None:
        self._to(State.RELEASED)

    def _tell(self, outcome: str, usage: Usage | None) -> None:
        if usage is not None:
            trust = self._upstream.counter.trust
            if self._counted_prompt is not None:
                trust.reported(self._count_source, self._counted_prompt, usage.prompt)
            elif self._bound is not None and usage.prompt > sum(self._bound.ask.prompts):
                trust.above_bound(sum(self._bound.ask.prompts), usage.prompt)
        self._gateway.observe(
            Finished(
                outcome,
                clock.now() - self._started,
                self._wait,
                None if usage is None else usage.total,
                self._priced_tokens,
                self._reserved_tokens,
                self._counted_prompt,
                None if usage is None else usage.prompt,
                self._tenant,
            )
        )
