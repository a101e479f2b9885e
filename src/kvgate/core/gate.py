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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from kvgate.core.accounts import Account, Waiter
from kvgate.core.figures import figures
from kvgate.core.forecast import Forecast
from kvgate.core.ledger import Ledger, NotHeld
from kvgate.core.line import PASSES_MAX, Line
from kvgate.core.places import Place, Places
from kvgate.core.policy import Policy, worst_case
from kvgate.core.price import price
from kvgate.core.records import Ask, Ending, Granted, Key, PoolFacts, Price, Queued, Reason, Refused, Seconds

Charge: TypeAlias = tuple[int, int]  # blocks and sequences

# Waiters are small (under 1 KiB), but an endless line only turns refusals into time-outs.
LINE_LIMIT = 1024


class Gate:
    """Admission to one pool."""

    def __init__(
        self,
        facts: PoolFacts,
        *,
        policy: Policy = worst_case,
        line_limit: int = LINE_LIMIT,
        line_blocks: int | None = None,
        floors: Mapping[int, float] | None = None,
        passes_max: int = PASSES_MAX,
    ) -> None:
        self.ledger = Ledger(facts)
        self.line = Line(line_limit, blocks_limit=line_blocks, floors=floors, passes_max=passes_max)
        self.places = Places(passes_max)
        self.forecast = Forecast()
        self.policy = policy
        self.admissions = 0
        self.refusals: Counter[Reason] = Counter()
        self.releases: Counter[Ending] = Counter()
        self._costs: dict[Key, tuple[Account, float, Seconds]] = {}  # account, cost charged, since

    @property
    def facts(self) -> PoolFacts:
        return self.ledger.facts

    def at_once(self, ask: Ask, now: Seconds) -> Granted | None:
        """A grant, where nobody waits, here or away, and it does not matter who asks. None: call `ask`."""
        if self.line or self.places:
            return None
        self.line.shares.know(ask.tenant)
        found = self._price(ask)
        if isinstance(found, Reason) or not self._may_go(ask, *found, now, now):
            return None
        return self._grant(self.ledger.new_key(), ask, found[0], found[1:], now, now, now)

    def ask(self, ask: Ask, now: Seconds) -> Granted | Queued | Refused:
        """`Granted`: the caller owns the reservation. `Queued`: it owns a place in the line, and
        must call `ended` if it leaves. `Refused`: there is nothing to end."""
        self.line.shares.know(ask.tenant)
        found = self._price(ask)
        if isinstance(found, Reason):
            return self._refuse(found, ask, now)
        priced, blocks, seqs = found
        kept = self.places.back(ask.identity, now) if ask.identity else None
        since = kept.since if kept is not None else now
        passed = self._passed_by(ask, since)
        if passed is not None and self._may_go(ask, priced, blocks, seqs, since, now):
            for waiter in passed:
                waiter.passes += 1
            return self._grant(self.ledger.new_key(), ask, priced, (blocks, seqs), since, now, now)
        if ask.max_wait <= 0:
            return self._refuse(self._why_not(ask, blocks), ask, now, place=kept)
        if not self.line.has_room_for(ask, blocks):
            return self._refuse(Reason.QUEUE_FULL, ask, now, place=kept)
        if not self.forecast.is_cold and self._wait_for(ask, blocks, now) > ask.max_wait:
            # It would only be refused later, and come back later.
            return self._refuse(self._why_not(ask, blocks), ask, now, place=kept)
        waiter = Waiter(self.ledger.new_key(), ask, priced, blocks, seqs, now, now + ask.max_wait, since)
        if kept is not None:
            waiter.passes = kept.passes
        self.line.join(waiter)
        return Queued(waiter.key, waiter.deadline)

    def ended(
        self, key: Key, ending: Ending, now: Seconds, *, tokens: int | None = None
    ) -> list[Granted | Refused]:
        """A granted request ended, or a waiting one left. Returns the answers that this allows.

        `tokens`: how many were generated for each sequence, where that is known.
        """
        if self.line.leave(key) is not None:
            return self._advance(now)
        try:
            blocks = self.ledger.release(key)
        except NotHeld:
            return []
        account, cost, since = self._costs.pop(key)
        self.line.shares.let_go(account, blocks, blocks * (now - since) - cost)
        self.forecast.ended(key, now, learn=ending is Ending.COMPLETED, tokens=tokens)
        self.releases[ending] += 1
        return self._advance(now)

    def settle(self, key: Key, blocks: int, now: Seconds) -> list[Granted | Refused]:
        """Correct a reservation downwards, after an exact count of its prompt."""
        freed = self.ledger.settle(key, blocks)
        if not freed:
            return []
        account, cost, since = self._costs[key]
        less = cost * freed / (blocks + freed)
        self._costs[key] = (account, cost - less, since)
        self.line.shares.let_go(account, freed, -less)
        self.forecast.settled(key, blocks)
        return self._advance(now)

    def tick(self, now: Seconds) -> list[Granted | Refused]:
        """Time has passed: let in who fits, refuse who has waited until the deadline."""
        answers = self._advance(now)
        for waiter in self.line.take_expired(now):
            answers.append(self._turn_away(waiter, Reason.QUEUE_TIMEOUT, now))
        # The head may have been what the others waited behind.
        return answers + self._advance(now)

    def wake_at(self) -> Seconds | None:
        """When `tick` has something to do; None while nobody waits."""
        return self.line.next_deadline()

    def resize(self, facts: PoolFacts, now: Seconds) -> list[Granted | Refused]:
        """The engine has other sizes now. Held reservations stay; nothing is granted beyond them."""
        self.ledger.resize(facts)
        answers: list[Granted | Refused] = []
        # Those who wait are priced again; some may never fit now.
        for waiter in list(self.line):
            self.line.leave(waiter.key)
            tenant = self.line.shares.account(waiter.ask.tenant).tenant  # its ceiling may be another now
            waiter.ask = ask = replace(waiter.ask, tenant=tenant)
            if isinstance(found := self._price(ask), Reason):
                answers.append(self._turn_away(waiter, found, now))
                continue
            self.line.join(replace(waiter, price=found[0], blocks=found[1], seqs=found[2]))
        return answers + self._advance(now)

    def refused(self, reason: Reason) -> None:
        """Count a refusal that was decided outside (bad body, unknown path, draining)."""
        self.refusals[reason] += 1

    def explain(self, ask: Ask, now: Seconds) -> Granted | Refused:
        """What `ask` would be answered now without waiting. Changes nothing."""
        if isinstance(found := self._free_way(ask, now), Reason):
            return self._describe(found, ask, now)
        return Granted(0, found[0].blocks, found[0].sequences, found[0].output_cap)

    def take(self, ask: Ask, now: Seconds) -> Granted | None:
        """A grant, where `explain` says so; else None, and nothing has changed or been counted."""
        if isinstance(found := self._free_way(ask, now), Reason):
            return None
        if ask.identity:
            self.places.back(ask.identity, now)
        for waiter in self._passed_by(ask, now) or ():
            waiter.passes += 1
        return self._grant(self.ledger.new_key(), ask, found[0], found[1:], now, now, now)

    def _free_way(self, ask: Ask, now: Seconds) -> Reason | tuple[Price, int, int]:
        """Its price and charge, where a newcomer could go at once; else why not."""
        found = self._price(ask)
        if isinstance(found, Reason):
            return found
        if self._passed_by(ask, now) is not None and self._may_go(ask, *found, now, now):
            return found
        return self._why_not(ask, found[1])

    def _passed_by(self, ask: Ask, since: Seconds) -> Sequence[Waiter] | None:
        return self.line.passed_by(ask, since, self.ledger.facts.usable_blocks) if self.line else ()

    def _price(self, ask: Ask) -> Reason | tuple[Price, int, int]:
        """Its price, and the blocks and sequences that it is charged; or why it can never get in."""
        facts = self.ledger.facts
        priced = price(ask, facts)
        if isinstance(priced, Reason):
            return priced
        blocks, seqs = self.policy(ask, priced, facts)
        most = ask.tenant.never_above
        return Reason.KV_CAPACITY_EXCEEDED if most is not None and blocks > most else (priced, blocks, seqs)

    def _may_go(self, ask: Ask, priced: Price, blocks: int, seqs: int, since: Seconds, now: Seconds) -> bool:
        """True if there is room now, for the tenant too, and beside one that is kept a place."""
        if not self.ledger.fits(blocks, seqs):
            return False
        tenant = ask.tenant
        if tenant.ceiling is not None and not self.line.shares.account(tenant).may_take(blocks):
            return False
        kept = self.places.room_kept(now, self.ledger.facts.usable_blocks)
        return (
            kept is None
            or since <= kept.since
            or self.ledger.fits(blocks + kept.blocks, seqs + kept.seqs)
            # Room that will be back before the absent one is does not have to lie idle.
            or now + self.forecast.expected_life(priced.output_cap, tenant.name) <= kept.due
        )

    def _why_not(self, ask: Ask, blocks: int) -> Reason:
        if ask.tenant.ceiling is not None and not self.line.shares.account(ask.tenant).may_take(blocks):
            return Reason.TENANT_LIMIT
        return Reason.KV_CAPACITY

    def _wait_for(self, ask: Ask, blocks: int, now: Seconds) -> Seconds:
        """When a newcomer would probably get in from the line."""
        before = self.line.shares.blocks_before(ask.tenant)
        return self.forecast.room_in(int(before) + blocks - self.ledger.headroom, now)

    def _grant(
        self, key: Key, ask: Ask, priced: Price, charge: Charge, since: Seconds, joined: Seconds, now: Seconds
    ) -> Granted:
        blocks, seqs = charge
        favoured = self.places.favoured(now)
        if favoured is not None and since > favoured.since:
            favoured.passes += not self.ledger.fits(blocks + favoured.blocks, seqs + favoured.seqs)
        if self.ledger.reserve(blocks, seqs, key) is None:
            raise AssertionError("the caller looked, and nothing can have come between")
        tenant = ask.tenant
        cost = blocks * self.forecast.started(key, priced.output_cap, blocks, now, tenant.name)
        self._costs[key] = (self.line.shares.hold(tenant, blocks, cost), cost, now)
        self.admissions += 1
        return Granted(key, blocks, priced.sequences, priced.output_cap, now - joined)

    def _advance(self, now: Seconds) -> list[Granted | Refused]:
        """Serve the line from its head for as long as the head, or one behind it, fits."""
        answers: list[Granted | Refused] = []
        line, usable = self.line, self.ledger.facts.usable_blocks
        while line and (head := line.shares.head(usable)) is not None:
            w: Waiter | None = head
            if not self._waiter_may_go(head, now):
                w = self._one_that_fits(head, usable, now) if line.may_be_passed(head, usable) else None
                if w is None:
                    break
                head.passes += 1
            assert w is not None
            line.leave(w.key)
            answers.append(self._grant(w.key, w.ask, w.price, (w.blocks, w.seqs), w.place, w.joined, now))
        return answers

    def _waiter_may_go(self, w: Waiter, now: Seconds) -> bool:
        return self._may_go(w.ask, w.price, w.blocks, w.seqs, w.place, now)

    def _one_that_fits(self, head: Waiter, usable: int, now: Seconds) -> Waiter | None:
        if not self.ledger.fits(1, 0):
            return None
        return next((w for w in self.line.shares.behind(head, usable) if self._waiter_may_go(w, now)), None)

    def _turn_away(self, waiter: Waiter, reason: Reason, now: Seconds) -> Refused:
        """Refuse one that has waited; if it comes back, it stands where it stood."""
        place = Place(waiter.place, 0, 0, 0.0, waiter.ask.tries, waiter.passes)
        return self._refuse(reason, waiter.ask, now, key=waiter.key, place=place)

    def _refuse(
        self, reason: Reason, ask: Ask, now: Seconds, key: Key | None = None, place: Place | None = None
    ) -> Refused:
        self.refusals[reason] += 1
        refused = self._describe(reason, ask, now, key)
        if not reason.is_busy:
            return refused
        needed = -(-refused.needed_tokens // self.ledger.facts.block_size)
        is_possible = refused.needed_tokens <= refused.usable_tokens  # while so much is held back
        short = max(1, needed - self.ledger.headroom + self.line.blocks) if is_possible else None
        wait = self.forecast.slot(needed, short, now, ask.draw)
        if ask.identity:
            since, tries, passes = (place.since, place.tries + 1, place.passes) if place else (now, 0, 0)
            seqs = ask.choices * len(ask.prompts)
            tries = max(tries, ask.tries)
            self.places.keep(ask.identity, Place(since, needed, seqs, now + wait, tries, passes))
        return replace(refused, retry_after=wait)

    def _describe(self, reason: Reason, ask: Ask, now: Seconds, key: Key | None = None) -> Refused:
        # What has to be left for those who wait, and for one who will be back, is not free for a newcomer,
        # and behind a head that waits for sequences blocks may be free and still nobody gets in.
        ceiling = ask.tenant.ceiling
        room = None if ceiling is None else max(0, ceiling - self.line.shares.account(ask.tenant).held)
        free = self.ledger.free_blocks - self.line.blocks
        free_seqs = 0 if self.line else self.ledger.free_seqs
        kept = self.places.room_kept(now, self.ledger.facts.usable_blocks)
        if kept is not None:
            free -= kept.blocks
            free_seqs = None if free_seqs is None else max(0, free_seqs - kept.seqs)
        return figures(reason, ask, self.ledger.facts, max(0, free), free_seqs, room, key)
