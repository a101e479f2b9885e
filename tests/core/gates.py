"""Short words for the gate's tests: a pool, a request of so many blocks, and each kind of answer."""

from __future__ import annotations

from collections.abc import Iterable

from kvgate.core.gate import Gate
from kvgate.core.records import Ask, Granted, Key, PoolFacts, Queued, Refused


def pool(total: int = 10, seqs: int | None = None, context: int = 1000) -> PoolFacts:
    return PoolFacts(total, block_size=1, context=context, max_seqs=seqs, safety_fraction=1.0)


def of(blocks: int, wait: float = 0.0) -> Ask:
    """A request that reaches exactly `blocks`."""
    return Ask((1,), blocks, max_wait=wait)


def granted(gate: Gate, ask: Ask, now: float = 0.0) -> Key:
    answer = gate.ask(ask, now)
    assert isinstance(answer, Granted), answer
    return answer.key


def queued(gate: Gate, ask: Ask, now: float = 0.0) -> Key:
    answer = gate.ask(ask, now)
    assert isinstance(answer, Queued), answer
    return answer.key


def refused(gate: Gate, ask: Ask, now: float = 0.0) -> Refused:
    answer = gate.ask(ask, now)
    assert isinstance(answer, Refused), answer
    return answer


def keys(answers: Iterable[Granted | Refused]) -> list[Key | None]:
    answers = list(answers)
    assert [type(answer) for answer in answers] == [Granted] * len(answers)
    return [answer.key for answer in answers]
