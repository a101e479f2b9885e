"""One decision out of price, ledger and line. Every front and the simulator drive this object.

    ask()    a request wants in        -> Granted | Queued | Refused
    ended()  a request has ended       -> who may go next
    tick()   time has passed           -> who may go next, and who has waited too long
    wake_at()                          -> when to call tick

Promises: a request that got `Granted` is never refused later; a grant is ended once, and ending it
again changes nothing and is counted; nobody is granted who has left the line.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from kvgate.core.forecast import Forecast
from kvgate.core.ledger import Ledger, NotHeld
from kvgate.core.line import Line, Waiter
from kvgate.core.policy import Policy, worst_case
from kvgate.core.price import output_cap_that_fits, price, worst_case_blocks
from kvgate.core.records import (
    Ask,
    Ending,
    Granted,
    Key,
    PoolFacts,
    Queued,
    Reason,
    Refused,
    Seconds,
)

# Waiters are small (under 1 KiB), but an endless line only turns refusals into time-outs.
LINE_LIMIT = 1024


class Gate:
    """Admission to one pool."""

    def __init__(
        self, facts: PoolFacts, *, policy: Policy = worst_case, line_limit: int = LINE_LIMIT
    ) -> None:
        self.ledger = Ledger(facts)
        self.line = Line(line_limit)
        self.forecast = Forecast()
        self.policy = policy
        self.admissions = 0
        self.refusals: Counter[Reason] = Counter()
        self.releases: Counter[Ending] = Counter()

    @property
    def facts(self) -> PoolFacts:
        return self.ledger.facts

    def ask(self, ask: Ask, now: Seconds) -> Granted | Queued | Refused:
        """`Granted`: the caller owns the reservation. `Queued`: it owns a place in the line, and
        must call `ended` if it leaves. `Refused`: there is nothing to end."""
        facts = self.ledger.facts
        priced = price(ask, facts)
        if isinstance(priced, Reason):
            return self._refuse(priced, ask, now)
        blocks, seqs = self.policy(ask, priced, facts)
        # Nobody overtakes the line, even if there is room for a small one.
        if not self.line and self.ledger.fits(blocks, seqs):
            key = self.ledger.new_key()
            return self._grant(Waiter(key, ask, priced, now, now), now)
        if ask.max_wait <= 0:
            return self._refuse(Reason.KV_CAPACITY, ask, now)
        if self.line.is_full:
            return self._refuse(Reason.QUEUE_FULL, ask, now)
        key = self.ledger.new_key()
        self.line.join(Waiter(key, ask, priced, now, now + ask.max_wait))
        return Queued(key, now + ask.max_wait)

    def ended(self, key: Key, ending: Ending, now: Seconds) -> list[Granted | Refused]:
        """A granted request ended, or a waiting one left. Returns the answers that this allows."""
        if self.line.leave(key) is not None:
            return self._advance(now)
        try:
            self.ledger.release(key)
        except NotHeld:
            return []
        self.forecast.ended(key, now, learn=ending is Ending.COMPLETED)
        self.releases[ending] += 1
        return self._advance(now)

    def settle(self, key: Key, blocks: int, now: Seconds) -> list[Granted | Refused]:
        """Correct a reservation downwards, after an exact count of its prompt."""
        if not self.ledger.settle(key, blocks):
            return []
        self.forecast.settled(key, blocks)
        return self._advance(now)

    def tick(self, now: Seconds) -> list[Granted | Refused]:
        """Time has passed: let in who fits, refuse who has waited until the deadline."""
        answers = self._advance(now)
        for waiter in self.line.expired(now):
            self.line.leave(waiter.key)
            answers.append(self._refuse(Reason.QUEUE_TIMEOUT, waiter.ask, now, key=waiter.key))
        # The head may have been what the others waited behind.
        return answers + self._advance(now)

    def wake_at(self) -> Seconds | None:
        """When `tick` has something to do; None while nobody waits."""
        return self.line.next_deadline()

    def resize(self, facts: PoolFacts, now: Seconds) -> list[Granted | Refused]:
        """The engine has other sizes now. Held reservations stay; nothing is granted beyond them."""
        self.ledger.resize(facts)
        return self._advance(now)

    def refused(self, reason: Reason) -> None:
        """Count a refusal that was decided outside (bad body, unknown path, draining)."""
        self.refusals[reason] += 1

    def explain(self, ask: Ask, now: Seconds) -> Granted | Refused:
        """What `ask` would be answered now without waiting. Changes nothing."""
        facts = self.ledger.facts
        priced = price(ask, facts)
        if isinstance(priced, Reason):
            return self._describe(priced, ask, now)
        blocks, seqs = self.policy(ask, priced, facts)
        if not self.line and self.ledger.fits(blocks, seqs):
            return Granted(0, priced.blocks, priced.sequences, priced.output_cap)
        return self._describe(Reason.KV_CAPACITY, ask, now)

    def _grant(self, waiter: Waiter, now: Seconds) -> Granted:
        priced = waiter.price
        blocks, seqs = self.policy(waiter.ask, priced, self.ledger.facts)
        if self.ledger.reserve(blocks, seqs, waiter.key) is None:
            raise AssertionError("the caller looked, and nothing can have come between")
        self.forecast.started(waiter.key, priced.output_cap, blocks, now)
        self.admissions += 1
        return Granted(waiter.key, blocks, priced.sequences, priced.output_cap, now - waiter.since)

    def _advance(self, now: Seconds) -> list[Granted | Refused]:
        """Serve the line from its head for as long as the head fits."""
        answers: list[Granted | Refused] = []
        while (waiter := self.line.head()) is not None:
            facts = self.ledger.facts
            # Priced again: the engine may have shrunk or grown since this one joined.
            priced = price(waiter.ask, facts)
            if isinstance(priced, Reason):
                self.line.leave(waiter.key)
                answers.append(self._refuse(priced, waiter.ask, now, key=waiter.key))
                continue
            if not self.ledger.fits(*self.policy(waiter.ask, priced, facts)):
                break
            self.line.leave(waiter.key)
            current = Waiter(waiter.key, waiter.ask, priced, waiter.since, waiter.deadline)
            answers.append(self._grant(current, now))
        return answers

    def _refuse(self, reason: Reason, ask: Ask, now: Seconds, key: Key | None = None) -> Refused:
        self.refusals[reason] += 1
        refused = self._describe(reason, ask, now, key)
        if not reason.is_busy:
            return refused
        needed = -(-refused.needed_tokens // self.ledger.facts.block_size)
        short = max(1, needed - self.ledger.free_blocks)
        wait = self.forecast.slot(needed, short, now, ask.draw)
        return replace(refused, retry_after=wait)

    def _describe(self, reason: Reason, ask: Ask, now: Seconds, key: Key | None = None) -> Refused:
        facts = self.ledger.facts
        blocks, cap = worst_case_blocks(ask, facts)
        # What has to be left for those who wait is not free for a newcomer.
        free = max(0, self.ledger.free_blocks - self.line.blocks)
        usable_seqs = facts.max_seqs
        if reason is Reason.KV_CAPACITY_EXCEEDED:
            fits = output_cap_that_fits(ask, facts, facts.usable_blocks, usable_seqs)
        elif reason is Reason.CONTEXT_LENGTH_EXCEEDED or self.line:
            # Behind a head that waits for sequences, blocks may be free and still nobody gets in.
            fits = None
        else:
            fits = output_cap_that_fits(ask, facts, free, self.ledger.free_seqs)
        return Refused(
            reason,
            key,
            prompt_tokens=sum(ask.prompts),
            needed_tokens=blocks * facts.block_size,
            free_tokens=free * facts.block_size,
            usable_tokens=facts.usable_blocks * facts.block_size,
            context=facts.context,
            output_cap=cap,
            output_cap_was_set=ask.output_cap is not None,
            output_cap_that_fits=fits,
        )
