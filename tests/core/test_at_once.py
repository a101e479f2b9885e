"""The short way into the gate: the same answer as the long one, or none and no trace."""

from __future__ import annotations

from dataclasses import replace

from gates import granted, of, pool
from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.gate import Gate
from kvgate.core.records import Ask, Ending, Granted, Queued, Tenant

asks = st.builds(
    Ask,
    prompts=st.lists(st.integers(1, 12), min_size=1, max_size=2).map(tuple),
    output_cap=st.none() | st.integers(1, 12),
    choices=st.integers(1, 2),
    max_wait=st.sampled_from([0.0, 20.0]),
    tenant=st.sampled_from([Tenant("a"), Tenant("b", ceiling=8)]),
    identity=st.integers(0, 3),
)
moves = st.lists(asks | st.integers(0, 5), max_size=20)


def books(gate: Gate) -> object:
    held = [(key, gate.ledger.held(key)) for key in gate.ledger]
    accounts = [gate.line.shares.account(Tenant(name)) for name in ("a", "b")]
    return (
        (held, gate.ledger.reserved_seqs, len(gate.line), len(gate.places)),
        (gate.admissions, dict(gate.refusals), dict(gate.releases)),
        [(account.held, account.charged) for account in accounts],
    )


def lived_through(history: list[Ask | int]) -> tuple[Gate, float]:
    """A gate after these moves: a question, or the end of the n-th that is live."""
    gate, now = Gate(pool(30, seqs=5, context=12)), 0.0
    for move in history:
        now += 0.5
        if isinstance(move, Ask):
            gate.ask(move, now)
        elif move < len(gate.ledger):
            gate.ended(list(gate.ledger)[move], Ending.COMPLETED, now)
    return gate, now + 0.5


@given(moves, asks)
def test_the_short_way_gives_the_same_grant_as_the_long_one_or_none(
    history: list[Ask | int], ask: Ask
) -> None:
    (short, now), (long, _) = lived_through(history), lived_through(history)
    before = books(short)

    given_at_once = short.at_once(ask, now)
    answer = long.ask(ask, now)

    if given_at_once is None:
        assert books(short) == before
        assert isinstance(answer, Granted) <= bool(short.line or short.places)
    else:
        assert given_at_once == answer
        assert books(short) == books(long)


@given(moves, asks, st.integers(0, 3), st.sampled_from([0.0, 0.1, 20.0]))
def test_who_gets_in_the_short_way_would_get_in_whoever_it_is(
    history: list[Ask | int], ask: Ask, identity: int, wait: float
) -> None:
    (short, now), (long, _) = lived_through(history), lived_through(history)
    given_at_once = short.at_once(ask, now)
    if given_at_once is not None:
        assert long.ask(replace(ask, identity=identity, max_wait=wait), now) == given_at_once


def test_nobody_goes_the_short_way_past_one_that_waits() -> None:
    gate = Gate(pool(10))
    granted(gate, of(6))
    assert isinstance(gate.ask(of(5, wait=9.0), 0.0), Queued)
    assert gate.at_once(of(1), 0.0) is None


def test_nobody_goes_the_short_way_past_one_that_is_away() -> None:
    gate = Gate(pool(10))
    granted(gate, of(6))
    gate.ask(replace(of(5), identity=7), 0.0)
    assert gate.at_once(of(1), 0.0) is None
