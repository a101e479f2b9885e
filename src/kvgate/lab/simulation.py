"""Clients, an engine and faults around the real `Gate`, on one thread and from one seed.

Promise: the same seed gives the same episode, step by step (compare the digests), and an episode
that breaks a law raises `Violation` with the command that replays it. Each seed draws its own mix
of faults, so that some episodes are mostly cancels and others mostly deaths, instead of all being
the same grey average.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from kvgate.core.gate import Gate
from kvgate.core.records import Ask, Ending, Granted, Key, PoolFacts, Queued, Refused
from kvgate.lab.auditor import Auditor, Client, Engine, Violation, law, pages
from kvgate.lab.swarm import Swarm, draw_client, draw_pool, draw_resize

MakeGate = Callable[[PoolFacts], Gate]
STEPS_MAX = 5_000  # an episode takes about 100; more means that it does not come to rest


@dataclass(frozen=True, slots=True)
class Report:
    """What an episode did. `digest` is a hash of its whole trace."""

    seed: int
    digest: str
    steps: int
    events: Counter[str]


class Episode:
    """One seed: a pool, some clients, a mix of faults, and calm at the end."""

    def __init__(self, seed: int, make_gate: MakeGate = Gate, log: Callable[[str], None] | None = None):
        self.seed, self.log, self.rng = seed, log, random.Random(seed)
        self.facts, self.swarm = draw_pool(self.rng), Swarm.draw(self.rng)
        self.gate, self.engine, self.auditor = make_gate(self.facts), Engine(self.facts), Auditor(self.facts)
        self.gate.line.passes_max = self.auditor.passes_max = self.swarm.passes
        self.gate.line.shares.floors.update(self.swarm.floors)
        self.auditor.floors.update(self.swarm.floors)
        self.auditor.knows_some = self.swarm.known > 0
        self.now, self.serial, self.steps, self.stepping = 0.0, 0, 0, False
        self.wake: float | None = None
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.clients: dict[Key, Client] = {}
        self.trace = hashlib.blake2b(digest_size=8)
        self.events: Counter[str] = Counter()
        for _ in range(self.swarm.clients):
            self.at(self.rng.randint(0, 20), self.arrive, draw_client(self.rng, self.facts, self.swarm))
        for _ in range(self.swarm.deaths):
            self.at(self.rng.randint(2, 50), self.die)
        for _ in range(self.swarm.resizes):
            self.at(self.rng.randint(1, 50), self.resize)

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self.heap, (when, self.serial, call, args))
        self.serial += 1

    def later(self, call: Callable[..., None], *args: Any) -> None:
        self.at(self.now + self.rng.randint(0, self.swarm.lag), call, *args)

    def note(self, event: str, detail: object = "") -> None:
        line = f"{self.now:.6f} {event} {detail}"
        self.events[event] += 1
        self.trace.update(line.encode())
        if self.log is not None:
            self.log(line)

    def run(self) -> Report:
        while self.heap:
            self.now, _, call, args = heapq.heappop(self.heap)
            call(*args)
            self.steps += 1
            law(self.steps < STEPS_MAX, "the episode does not come to rest")
            self.auditor.check(self.gate, self.engine, self.now)
            wake = self.gate.wake_at()
            if wake is not None and wake != self.wake:
                self.at(wake, self.tick)
            self.wake = wake
        self.calm()
        return Report(self.seed, self.trace.hexdigest(), self.steps, self.events)

    # What clients do

    def arrive(self, client: Client) -> None:
        if client.state != "new":
            return  # it was cut before it could ask
        if self.rng.random() < self.swarm.cancels:
            self.at(self.now + self.rng.randint(0, 30), self.cancel, client)
        client.tries += 1
        foretold = self.gate.explain(client.ask, self.now)
        answer = self.gate.ask(client.ask, self.now)
        # One that is known may have kept a better place than `explain` can see.
        is_foretold = isinstance(answer, Granted) == isinstance(foretold, Granted)
        if isinstance(answer, Refused) and isinstance(foretold, Refused) and not client.ask.max_wait:
            is_foretold = answer.reason is foretold.reason
        law(is_foretold or client.ask.identity > 0, f"{foretold=}, but {answer=}")
        if isinstance(answer, Queued):
            self.note("queued", answer)
            law(client.ask.max_wait > 0, "only those who would wait are queued")
            client.key, client.state, client.deadline = answer.key, "waiting", answer.deadline
            law(answer.key not in self.clients, f"{answer.key} is used twice")
            self.clients[answer.key] = client
            self.auditor.joined(answer.key, client, self.now)
        elif isinstance(answer, Granted):
            law(answer.key not in self.clients, f"{answer.key} is used twice")
            self.clients[answer.key] = client
            self.granted(client, answer)
        else:
            if answer.retry_after is not None and answer.output_cap_that_fits is not None:
                smaller = replace(client.ask, output_cap=answer.output_cap_that_fits)
                told = self.gate.explain(smaller, self.now)
                is_true = isinstance(told, Granted) or client.ask.identity > 0
                law(is_true, f"{answer} named a cap that does not fit: {told}")
            self.refused(client, answer)

    def cancel(self, client: Client) -> None:
        """At any step: before the question, in the line, while it runs, after the end."""
        self.note("cancel", client.state)
        if client.state == "new":
            client.state = "over"
        elif client.state == "waiting":
            client.state = "over"
            del self.auditor.line[client.key]
            self.answers(self.gate.ended(client.key, Ending.CANCELLED, self.now))
            self.again(client)
        elif client.state == "running":
            client.state = "leaving"
            self.later(self.let_go, client)

    def let_go(self, client: Client) -> None:
        """The engine has noticed that the client is gone; only now the gate hears of it."""
        self.engine.drop(client.key)
        self.later(self.end, client, Ending.CANCELLED)

    def end(self, client: Client, ending: Ending) -> None:
        self.note("end", (client.key, ending.value))
        client.state = "over"
        del self.auditor.live[client.key]
        self.answers(self.gate.ended(client.key, ending, self.now))
        self.again(client)

    def again(self, client: Client) -> None:
        """The same end is signalled twice, by another part of a careless caller."""
        if self.rng.random() < self.swarm.doubles:
            self.later(self.double, client.key, self.rng.choice(list(Ending)))

    def double(self, key: Key, ending: Ending) -> None:
        self.note("double", key)
        self.auditor.doubles += 1
        law(not self.gate.ended(key, ending, self.now), f"{key} ended twice and let somebody in")

    # What the gate answers

    def answers(self, answers: Iterable[Granted | Refused]) -> None:
        for answer in answers:
            client = self.clients.get(answer.key or 0)
            law(client is not None and client.state == "waiting", f"{answer} is for nobody who waits")
            assert client is not None
            if isinstance(answer, Granted):
                self.granted(client, answer)
            else:
                self.refused(client, answer)

    def granted(self, client: Client, answer: Granted) -> None:
        self.note("granted", answer)
        self.auditor.granted(client, answer)
        client.key, client.state, client.cap = answer.key, "running", answer.output_cap
        self.later(self.send, client)
        if client.truth != client.ask.prompts:
            self.later(self.settle, client)

    def refused(self, client: Client, answer: Refused) -> None:
        self.note(answer.reason.value, answer)
        self.auditor.refused(client, answer, self.now)
        client.state = "over"
        if answer.retry_after is not None and client.tries < 3:
            client.state = "new"
            self.at(self.now + answer.retry_after, self.arrive, client)

    def settle(self, client: Client) -> None:
        if client.key not in self.auditor.live:
            return
        blocks = client.ask.choices * sum(pages(p, client.cap, self.facts) for p in client.truth)
        self.note("settle", (client.key, blocks))
        law(blocks <= self.auditor.live[client.key][0], "an exact prompt cost more than an over-estimate")
        self.auditor.settled(client.key, blocks)
        self.answers(self.gate.settle(client.key, blocks, self.now))

    def tick(self) -> None:
        self.answers(self.gate.tick(self.now))
        law(all(w.deadline > self.now for w in self.auditor.line.values()), "tick forgot a deadline")

    # What the engine does

    def send(self, client: Client) -> None:
        if client.state != "running":
            return
        if not self.engine.up:
            client.state = "leaving"
            self.later(self.end, client, Ending.FAILED)
            return
        self.engine.start(client, client.cap)
        if not self.stepping:
            self.stepping = True
            self.at(self.now + 1, self.decode)

    def decode(self) -> None:
        for key in self.engine.step():
            client = self.clients[key]
            if client.state == "running":
                client.state = "leaving"
                self.later(self.end, client, Ending.COMPLETED)
        self.stepping = bool(self.engine.running)
        if self.stepping:
            self.at(self.now + 1, self.decode)

    def die(self) -> None:
        self.note("die")
        self.engine.up = False
        self.at(self.now + self.rng.randint(0, 9), self.recover)
        for key in list(self.engine.running):
            self.engine.drop(key)
            client = self.clients[key]
            if client.state == "running":
                client.state = "leaving"
                self.later(self.end, client, Ending.FAILED)

    def recover(self) -> None:
        self.engine.up = True

    def resize(self) -> None:
        self.resized(draw_resize(self.rng, self.gate.facts))

    def resized(self, facts: PoolFacts) -> None:
        self.note("resize", facts)
        self.auditor.facts, self.auditor.over = facts, True
        self.answers(self.gate.resize(facts, self.now))

    def calm(self) -> None:
        """Everybody has gone: nothing is held, and a request of the size of the pool goes in."""
        waiting = [c for c in self.clients.values() if c.state != "over"]
        law(not waiting and self.engine.held == 0, f"still there after the end: {waiting}")
        law(self.gate.admissions == sum(self.gate.releases.values()), "admissions are not releases")
        room = self.gate.facts.usable_blocks
        facts = replace(self.gate.facts, block_size=1, lookahead=0, context=room + 1, engine_context=None)
        if room > 0:
            self.resized(facts)
            whole = self.gate.ask(Ask(prompts=(1,), output_cap=room), self.now)
            law(isinstance(whole, Granted) and whole.blocks == room, f"the whole pool was asked: {whole}")


def run_episode(seed: int, make_gate: MakeGate = Gate, log: Callable[[str], None] | None = None) -> Report:
    """Play one seed. Raises `Violation`, whatever went wrong."""
    episode = Episode(seed, make_gate, log)
    try:
        return episode.run()
    except Exception as error:
        raise Violation(
            f"step {episode.steps}, time {episode.now}: {type(error).__name__}: {error}\n"
            f"replay: python -m kvgate.lab.simulation --episodes 1 --seed {seed} -v"
        ) from error


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvgate.lab.simulation", description=__doc__)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1, help="the first episode's seed; the next has seed + 1")
    parser.add_argument("-v", "--verbose", action="store_true", help="print every event")
    options = parser.parse_args(argv)
    print(f"seed {options.seed}, {options.episodes} episodes", flush=True)
    events: Counter[str] = Counter()
    began = time.perf_counter()
    for seed in range(options.seed, options.seed + options.episodes):
        try:
            report = run_episode(seed, log=print if options.verbose else None)
        except Violation as violation:
            print(f"seed {seed} FAILED at {violation}")
            return 1
        events += report.events
    print(f"all laws held; {time.perf_counter() - began:.1f} s; {dict(events.most_common())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
