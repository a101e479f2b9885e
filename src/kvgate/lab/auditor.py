"""An engine model and an independent book-keeper: what the simulation is judged by.

Neither knows the core's arithmetic or reads its state to decide. The engine takes a page whenever a
token needs one; the auditor keeps its books from questions and answers, and compares.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvgate.core.gate import Gate
from kvgate.core.records import ANYONE, Ask, Granted, Key, PoolFacts, Reason, Refused, Tenant

NEVER = (Reason.CONTEXT_LENGTH_EXCEEDED, Reason.KV_CAPACITY_EXCEEDED)


class Violation(AssertionError):
    """A law was broken. The message says which, when, and from which seed."""


@dataclass(slots=True)
class Client:
    """One request: what it asks, what is true of it, and how far it has come."""

    ask: Ask
    truth: tuple[int, ...]  # exact prompt lengths; the ask may have over-estimated them
    answer: int  # tokens until the model stops by itself
    key: Key = 0
    state: str = "new"  # new, waiting, running, leaving, over
    deadline: float = 0.0
    cap: int = 0
    tries: int = 0
    since: float = 0.0  # when it joined the line


def law(holds: bool, text: str) -> None:
    if not holds:
        raise Violation(text)


def stored(tokens: int, facts: PoolFacts) -> int:
    """Of a sequence that would be so long, drafts included."""
    return tokens if facts.engine_context is None else min(tokens, facts.engine_context)


def pages(prompt: int, cap: int, facts: PoolFacts) -> int:
    """Pages touched by the stored tokens of one sequence, counted and not divided."""
    last = stored(prompt + min(cap, facts.context - prompt) - 1 + facts.lookahead, facts)
    return len(range(0, last, facts.block_size))


def worst(ask: Ask, facts: PoolFacts) -> tuple[int, int] | Reason:
    """The auditor's own price: (blocks, sequences), or why it can never be admitted."""
    if any(p >= facts.context for p in ask.prompts):
        return Reason.CONTEXT_LENGTH_EXCEEDED
    asked = ask.rules.default if ask.output_cap is None else ask.output_cap
    cap = min(c for c in (asked, ask.rules.ceiling, facts.context) if c is not None)
    need = ask.choices * sum(pages(p, cap, facts) for p in ask.prompts), ask.choices * len(ask.prompts)
    ceiling = facts.usable_blocks if ask.tenant.ceiling is None else ask.tenant.ceiling
    over = need[0] > min(facts.usable_blocks, ceiling) or (
        facts.max_seqs is not None and need[1] > facts.max_seqs
    )
    return Reason.KV_CAPACITY_EXCEEDED if over else need


class Engine:
    """Takes a page when a token needs one. Enforces the cap it was sent, knows no price."""

    def __init__(self, facts: PoolFacts) -> None:
        self.facts, self.held, self.up = facts, 0, True
        self.running: dict[Key, list[list[int]]] = {}  # sequences of [stored, tokens left, pages]

    def start(self, client: Client, cap: int) -> None:
        rest = (min(cap, self.facts.context - p, client.answer) for p in client.truth)
        pairs = [(p, r) for p, r in zip(client.truth, rest, strict=True) for _ in range(client.ask.choices)]
        self.running[client.key] = [[p, r - 1, 0] for p, r in pairs]
        for sequence in self.running[client.key]:
            self._fill(sequence)

    def step(self) -> list[Key]:
        """One token for every sequence. Returns the requests that are complete."""
        done = []
        for key, sequences in self.running.items():
            for sequence in sequences:
                if sequence[1] > 0:
                    sequence[0] += 1
                    sequence[1] -= 1
                    self._fill(sequence)
            if all(left == 0 for _, left, _ in sequences):
                done.append(key)
        for key in done:
            self.drop(key)
        return done

    def drop(self, key: Key) -> None:
        self.held -= self.pages_of(key)
        self.running.pop(key, None)

    def pages_of(self, key: Key) -> int:
        return sum(held for _, _, held in self.running.get(key, ()))

    def _fill(self, sequence: list[int]) -> None:
        last = stored(sequence[0] + self.facts.lookahead, self.facts)
        while sequence[2] * self.facts.block_size < last:
            sequence[2] += 1
            self.held += 1


class Auditor:
    """Books kept from the questions and answers alone, and the laws.

    `knows_some`: some clients keep their place while they are away, so that room may be kept for one
    that is not there; then only the laws hold that do not depend on whose turn it is.
    """

    def __init__(self, facts: PoolFacts) -> None:
        self.facts = facts
        self.live: dict[Key, tuple[int, int, Tenant]] = {}
        self.line: dict[Key, Client] = {}
        self.floors: dict[int, float] = {}
        self.knows_some = False
        self.passes_max = 0
        self.passes: dict[Key, int] = {}  # how often the first of a tenant was passed by its own
        self.answered: set[Key] = set()
        self.over = False  # shrunk below what was reserved, and not yet drained
        self.doubles = 0

    def reserved(self) -> tuple[int, int]:
        return sum(b for b, _, _ in self.live.values()), sum(s for _, s, _ in self.live.values())

    def held_by(self, tenant: Tenant) -> int:
        return sum(blocks for blocks, _, whose in self.live.values() if whose == tenant)

    def fits(self, need: tuple[int, int], tenant: Tenant = ANYONE) -> bool:
        blocks, seqs = self.reserved()
        limit = self.facts.max_seqs
        if tenant.ceiling is not None and self.held_by(tenant) + need[0] > tenant.ceiling:
            return False
        return blocks + need[0] <= self.facts.usable_blocks and (limit is None or seqs + need[1] <= limit)

    def firsts(self) -> dict[Key, Client]:
        """Of each tenant the one that has waited longest. Not known where clients keep their place."""
        found: dict[Tenant, Key] = {}
        for key, client in self.line.items():
            found.setdefault(client.ask.tenant, key)
        return {key: self.line[key] for key in found.values()}

    def joined(self, key: Key, client: Client, now: float) -> None:
        client.since = now
        self.line[key] = client

    def settled(self, key: Key, blocks: int) -> None:
        _, seqs, tenant = self.live[key]
        self.live[key] = blocks, seqs, tenant

    def granted(self, client: Client, answer: Granted) -> None:
        need, tenant = worst(client.ask, self.facts), client.ask.tenant
        law(need == (answer.blocks, answer.sequences), f"granted {answer}, the auditor's price is {need}")
        law(
            self.fits((answer.blocks, answer.sequences), tenant),
            f"{answer} does not fit beside {self.reserved()}, {self.held_by(tenant)} of {tenant}",
        )
        if not self.knows_some:
            self._turns(client, answer)
        self._answer(answer.key)
        self.line.pop(answer.key, None)
        self.live[answer.key] = (answer.blocks, answer.sequences, tenant)

    def _turns(self, client: Client, answer: Granted) -> None:
        """Nobody is passed who fits, and nobody too often."""
        for key, first in self.firsts().items():
            if key == answer.key:
                continue
            due, tenant = worst(first.ask, self.facts), first.ask.tenant
            could = not isinstance(due, Reason) and self.fits(due, tenant)
            if tenant == client.ask.tenant:
                self.passes[key] = self.passes.get(key, 0) + 1
                law(self.passes[key] <= self.passes_max, f"{answer} is one too many to pass {key}")
                law(not could, f"{answer} passed {key}, which fits")
            elif self._rank(tenant) < self._rank(client.ask.tenant):
                law(not could, f"{answer} of {client.ask.tenant} passed {key} of {tenant}, which fits")

    def _rank(self, tenant: Tenant) -> tuple[bool, int]:
        """Less is earlier: classes below their floor, then by priority."""
        priority = tenant.priority
        held = sum(blocks for blocks, _, whose in self.live.values() if whose.priority == priority)
        is_below = held < self.floors.get(priority, 0.0) * self.facts.usable_blocks
        return not is_below, -priority

    def refused(self, client: Client, answer: Refused, now: float) -> None:
        need = worst(client.ask, self.facts)
        if answer.key is not None:
            self._answer(answer.key)
            law(self.line.pop(answer.key, None) is client, f"{answer} did not wait")
        if answer.reason in NEVER:
            law(need is answer.reason and answer.retry_after is None, f"{answer}, but the price is {need}")
            return
        late = answer.reason is Reason.QUEUE_TIMEOUT
        law(late == (answer.key is not None), f"{answer}: timed out if and only if it has waited")
        law(answer.retry_after is not None and 1 <= answer.retry_after <= 60, f"{answer.retry_after=}")
        law(not late or now >= client.deadline, f"{answer} before its deadline")
        tenant = client.ask.tenant
        if answer.reason is Reason.TENANT_LIMIT:
            assert not isinstance(need, Reason)
            room = None if tenant.ceiling is None else tenant.ceiling - self.held_by(tenant)
            law(room is not None and need[0] > room, f"{answer}, but {tenant} has room for {room}")
        if not late:
            full = not isinstance(need, Reason) and not self.fits(need, tenant)
            law(
                bool(self.line) or full or self.knows_some,
                f"{answer} although {need} fits beside {self.reserved()}",
            )

    def _answer(self, key: Key) -> None:
        law(key not in self.answered, f"request {key} was answered twice")
        self.answered.add(key)

    def check(self, gate: Gate, engine: Engine, now: float) -> None:
        """The laws that hold after every step."""
        blocks, seqs = self.reserved()
        books = gate.ledger.reserved_blocks, gate.ledger.reserved_seqs, len(gate.ledger), len(gate.line)
        mine = blocks, seqs, len(self.live), len(self.line)
        law(books == mine, f"gate says {books}, auditor says {mine} (blocks, seqs, live, waiting)")
        gate.ledger.recount()
        law(gate.ledger.double_releases == self.doubles, f"{gate.ledger.double_releases} doubles counted")
        limit = self.facts.max_seqs
        within = blocks <= self.facts.usable_blocks and (limit is None or seqs <= limit)
        law(within or self.over, f"{blocks} blocks, {seqs} sequences reserved of {self.facts}")
        self.over = self.over and not within
        total = sum(map(engine.pages_of, engine.running))
        law(engine.held == total <= blocks, f"engine holds {engine.held} of {blocks} reserved")
        law(self.over or total <= self.facts.total_blocks, f"engine overrun: {total} of {self.facts}")
        for key in engine.running:
            law(key in self.live, f"{key} was released while the engine still holds its blocks")
            law(engine.pages_of(key) <= self.live[key][0], f"{key} outgrew its price")
        if self.line and not self.knows_some:
            waiting = [(worst(c.ask, self.facts), c.ask.tenant) for c in self.firsts().values()]
            held_up = [n for n, t in waiting if not isinstance(n, Reason) and not self.fits(n, t)]
            law(bool(held_up), f"all wait, but {waiting} fit")
        law(all(w.deadline >= now for w in self.line.values()), "somebody waits beyond its deadline")
