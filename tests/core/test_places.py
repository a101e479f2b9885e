"""A client that comes back keeps its place, and room is kept for one of them at a time."""

from __future__ import annotations

from gates import pool, queued

from kvgate.core.gate import Gate
from kvgate.core.line import PASSES_MAX
from kvgate.core.places import GRACE, PLACES_MAX, TRIES_MAX, Place, Places
from kvgate.core.records import Ask, Ending, Granted, Refused


def place(since: float, due: float = 10.0, tries: int = 1) -> Place:
    return Place(since, 5, 1, due, tries)


def test_a_place_is_found_once_and_only_until_a_little_after_its_moment() -> None:
    places = Places(8)
    places.keep(7, place(1.0))
    found = places.back(7, 5.0)
    assert found is not None
    assert found.since == 1.0
    assert places.back(7, 5.0) is None
    places.keep(8, place(1.0, due=10.0))
    assert places.back(8, 10.0 + GRACE + 0.1) is None
    assert len(places) == 0


def test_room_is_kept_for_the_one_that_asked_first_among_those_that_came_back() -> None:
    places = Places(8)
    places.keep(1, place(1.0, tries=0))
    assert places.favoured(2.0) is None
    places.keep(2, place(3.0))
    places.keep(3, place(2.0))
    places.keep(4, place(0.5, tries=TRIES_MAX))
    favoured = places.favoured(4.0)
    assert favoured is not None
    assert favoured.since == 2.0
    places.back(3, 4.0)
    favoured = places.favoured(4.0)
    assert favoured is not None
    assert favoured.since == 3.0
    assert places.favoured(10.0 + GRACE + 0.1) is None


def test_those_who_hammer_cannot_grow_the_list() -> None:
    places = Places(8)
    for identity in range(1, 3 * PLACES_MAX):
        places.keep(identity, place(float(identity), due=1e6 + identity))
    assert len(places) == PLACES_MAX
    for _ in range(20 * PLACES_MAX):
        places.keep(1, place(1.0, due=2e6))
    assert len(places._by_due) <= 4 * PLACES_MAX + 1


def ask(blocks: int, identity: int, tries: int = 0, wait: float = 0.0) -> Ask:
    return Ask((1,), blocks, identity=identity, tries=tries, max_wait=wait)


def test_a_large_one_that_keeps_coming_back_gets_in_although_small_ones_never_stop() -> None:
    """120 % load of small ones, each living 10 s, and one that needs 80 % of the pool."""
    gate = Gate(pool(10))
    live: list[tuple[float, int]] = []
    due, admitted, passed, tries = 0.0, None, 0, 0
    step = 0
    while step < 4000 and admitted is None:
        now = step / 10
        while live and live[0][0] <= now:
            gate.ended(live.pop(0)[1], Ending.COMPLETED, now)
        if now >= due:
            answer = gate.ask(ask(8, identity=99), now)
            if isinstance(answer, Granted):
                admitted = now
                break
            assert isinstance(answer, Refused)
            assert answer.retry_after is not None
            due, tries = now + answer.retry_after, tries + 1
        if step % 8 == 0:
            small = gate.ask(ask(1, identity=0), now)
            if isinstance(small, Granted):
                live.append((now + 10, small.key))
                passed += tries >= 2
        step += 1
    assert admitted is not None
    assert tries <= 4
    assert passed <= PASSES_MAX


def test_one_that_comes_back_stands_before_those_that_came_after_it() -> None:
    gate = Gate(pool(10), passes_max=0)
    first = gate.ask(ask(10, identity=1), 0.0)
    assert isinstance(first, Granted)
    refused = gate.ask(ask(4, identity=2), 1.0)
    assert isinstance(refused, Refused)
    queued(gate, ask(10, identity=3, wait=100.0), 2.0)
    later = queued(gate, ask(10, identity=4, wait=100.0), 3.0)
    back = queued(gate, ask(4, identity=2, wait=100.0), 4.0)
    gate.ended(first.key, Ending.COMPLETED, 5.0)
    assert gate.ledger.reserved_blocks == 10  # the one that stood at the head stays there
    keys = [a.key for a in gate.ended(2, Ending.COMPLETED, 6.0)]
    assert keys[0] == back
    assert later not in keys


def test_a_refusal_beside_one_that_room_is_kept_for_names_a_cap_that_leaves_it() -> None:
    gate = Gate(pool(100), passes_max=0)
    first = gate.ask(ask(100, identity=1), 0.0)
    assert isinstance(first, Granted)
    for tries in range(2):  # so that room is kept for it
        assert isinstance(gate.ask(ask(30, identity=2, tries=tries), 1.0), Refused)
    gate.ended(first.key, Ending.CANCELLED, 1.0)
    place = gate.places.favoured(1.0)
    assert place is not None
    place.due = 1.5  # before any newcomer would be over
    newcomer = gate.ask(ask(80, identity=0), 1.5)
    assert isinstance(newcomer, Refused)
    assert (newcomer.free_tokens, newcomer.output_cap_that_fits) == (70, 70)
    assert isinstance(gate.explain(ask(71, identity=0), 1.5), Refused)
    assert isinstance(gate.explain(ask(70, identity=0), 1.5), Granted)
