"""The books are exact: never above usable, released once, and the same as a naive list would say."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from kvgate.core.ledger import Ledger, LedgerBroken, NotHeld
from kvgate.core.records import Misuse, PoolFacts


def pool(total: int, seqs: int | None = None) -> PoolFacts:
    return PoolFacts(total_blocks=total, block_size=1, context=10_000, max_seqs=seqs, safety_fraction=1.0)


demands = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 4)), max_size=40)


@given(st.integers(1, 200), st.none() | st.integers(1, 12), demands)
def test_reserved_is_never_above_usable_and_is_the_sum_of_the_live(
    total: int, seqs: int | None, wanted: list[tuple[int, int]]
) -> None:
    ledger = Ledger(pool(total, seqs))
    live = []
    for blocks, slots in wanted:
        expected = ledger.fits(blocks, slots)
        key = ledger.reserve(blocks, slots)
        assert expected == (key is not None)
        if key is not None:
            live.append((key, blocks, slots))
        assert ledger.reserved_blocks == sum(b for _, b, _ in live) <= total
        assert ledger.reserved_seqs == sum(s for _, _, s in live)
        assert seqs is None or ledger.reserved_seqs <= seqs
        assert ledger.free_blocks == total - ledger.reserved_blocks
        ledger.recount()
    assert list(ledger) == [key for key, _, _ in live]


@given(demands, st.randoms(use_true_random=False))
def test_everything_is_released_exactly_once_in_any_order(
    wanted: list[tuple[int, int]], rng: random.Random
) -> None:
    ledger = Ledger(pool(500))
    held = {key: blocks for blocks, seqs in wanted if (key := ledger.reserve(blocks, seqs)) is not None}
    keys = list(held) * 2
    rng.shuffle(keys)
    released = set()
    for key in keys:
        if key not in released:
            assert ledger.release(key) == held[key]
            released.add(key)
            continue
        before = (ledger.reserved_blocks, ledger.reserved_seqs, list(ledger), ledger.double_releases)
        with pytest.raises(NotHeld):
            ledger.release(key)
        after = (ledger.reserved_blocks, ledger.reserved_seqs, list(ledger), ledger.double_releases - 1)
        assert before == after
    assert (ledger.reserved_blocks, ledger.reserved_seqs, len(ledger)) == (0, 0, 0)
    assert ledger.double_releases == len(held)


@given(demands, st.randoms(use_true_random=False))
def test_the_order_of_operations_does_not_matter_when_all_fits(
    wanted: list[tuple[int, int]], rng: random.Random
) -> None:
    """Reserve all, settle some, release some: any order in which a key lives ends in the same books."""
    turns = list(range(len(wanted))) * 3
    outcomes = set()
    for _ in range(3):
        rng.shuffle(turns)
        ledger = Ledger(pool(40 * 40))
        keys: dict[int, int] = {}
        todo = {index: ["reserve", "settle"] + ["release"] * (index % 2) for index in range(len(wanted))}
        for index in turns:
            if not todo[index]:
                continue
            step, blocks = todo[index].pop(0), wanted[index][0]
            if step == "reserve":
                key = ledger.reserve(*wanted[index])
                assert key is not None
                keys[index] = key
            elif step == "settle":
                assert ledger.settle(keys[index], blocks // 2) == blocks - blocks // 2
            else:
                assert ledger.release(keys[index]) == blocks // 2
        outcomes.add((ledger.reserved_blocks, ledger.reserved_seqs, len(ledger)))
        ledger.recount()
    assert len(outcomes) == 1


def test_a_refused_reservation_changes_nothing() -> None:
    ledger = Ledger(pool(10, 2))
    assert ledger.reserve(8) is not None
    assert ledger.reserve(3) is None
    assert ledger.reserve(1, 2) is None
    assert (ledger.reserved_blocks, ledger.reserved_seqs, len(ledger)) == (8, 1, 1)
    assert ledger.reserve(2) is not None
    assert (ledger.free_blocks, ledger.free_seqs) == (0, 0)


def test_a_number_is_never_given_twice() -> None:
    ledger = Ledger(pool(10))
    keys = []
    for _ in range(20):
        key = ledger.reserve(10)
        assert key is not None
        keys += [key, ledger.new_key()]
        ledger.release(key)
    assert len(set(keys)) == 40


def test_a_number_that_is_live_or_was_not_given_out_cannot_be_reserved() -> None:
    ledger = Ledger(pool(10))
    key = ledger.reserve(1)
    for bad in (key, 0, -1, 99):
        with pytest.raises(Misuse):
            ledger.reserve(1, 1, bad)
    assert ledger.reserved_blocks == 1


def test_nobody_can_release_what_was_never_given_out() -> None:
    ledger = Ledger(pool(10))
    ledger.reserve(4)
    with pytest.raises(NotHeld):
        ledger.release(77)
    assert (ledger.reserved_blocks, ledger.double_releases) == (4, 1)


def test_a_settlement_never_grows_and_needs_a_live_reservation() -> None:
    ledger = Ledger(pool(10))
    key = ledger.reserve(5)
    assert key is not None
    for blocks in (6, -1):
        with pytest.raises(Misuse):
            ledger.settle(key, blocks)
    assert ledger.held(key) == 5
    assert ledger.settle(key, 5) == 0
    assert ledger.settle(key, 2) == 3
    assert ledger.release(key) == 2
    with pytest.raises(NotHeld):
        ledger.settle(key, 1)
    assert ledger.double_releases == 0


@pytest.mark.parametrize(("blocks", "seqs"), [(-1, 1), (1, -1)])
def test_a_negative_demand_is_misuse(blocks: int, seqs: int) -> None:
    with pytest.raises(Misuse):
        Ledger(pool(10)).reserve(blocks, seqs)


def test_a_shrunk_pool_keeps_what_is_held_and_grants_nothing_until_it_fits() -> None:
    ledger = Ledger(pool(10, 4))
    first, second = ledger.reserve(5), ledger.reserve(5)
    assert first is not None
    assert second is not None
    ledger.resize(pool(6, 1))
    assert (ledger.reserved_blocks, ledger.free_blocks, ledger.free_seqs) == (10, 0, 0)
    assert ledger.reserve(0, 1) is None
    assert ledger.reserve(1, 0) is None
    ledger.release(first)
    assert ledger.reserve(1, 0) is not None
    ledger.resize(pool(20))
    assert ledger.reserve(14, 9) is not None
    assert ledger.free_seqs is None


def test_a_recount_finds_books_that_were_tampered_with() -> None:
    ledger = Ledger(pool(10))
    ledger.reserve(3)
    ledger.reserved_blocks += 1
    with pytest.raises(LedgerBroken):
        ledger.recount()


def test_books_that_fall_below_zero_are_a_defect_and_not_an_answer() -> None:
    ledger = Ledger(pool(10))
    key = ledger.reserve(3)
    assert key is not None
    ledger.reserved_blocks = 1
    with pytest.raises(LedgerBroken):
        ledger.release(key)


def test_its_repr_says_what_is_held() -> None:
    ledger = Ledger(pool(10))
    ledger.reserve(3)
    assert repr(ledger) == "<Ledger 3 of 10 blocks reserved, 1 live>"


class AgainstANaiveList(RuleBasedStateMachine):
    """The same operations on a list that is summed up every time."""

    keys: Bundle[int] = Bundle("keys")
    ended: Bundle[int] = Bundle("ended")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(pool(50, 6))
        self.naive: list[tuple[int, int, int]] = []
        self.usable, self.slots, self.doubles = 50, 6, 0

    def sums(self) -> tuple[int, int]:
        return sum(b for _, b, _ in self.naive), sum(s for _, _, s in self.naive)

    @rule(target=keys, blocks=st.integers(0, 60), seqs=st.integers(0, 4))
    def reserve(self, blocks: int, seqs: int) -> MultipleResults[int] | int:
        held, slots = self.sums()
        key = self.ledger.reserve(blocks, seqs)
        assert (key is not None) == (held + blocks <= self.usable and slots + seqs <= self.slots)
        if key is None:
            return multiple()
        self.naive.append((key, blocks, seqs))
        return key

    @rule(key=keys, share=st.integers(0, 100))
    def settle(self, key: int, share: int) -> None:
        index, (_, blocks, seqs) = next((i, e) for i, e in enumerate(self.naive) if e[0] == key)
        exact = blocks * share // 100
        assert self.ledger.settle(key, exact) == blocks - exact
        self.naive[index] = (key, exact, seqs)

    @rule(target=ended, key=consumes(keys))
    def release(self, key: int) -> int:
        entry = next(e for e in self.naive if e[0] == key)
        assert self.ledger.release(key) == entry[1]
        self.naive.remove(entry)
        return key

    @rule(key=ended)
    def release_again(self, key: int) -> None:
        with pytest.raises(NotHeld):
            self.ledger.release(key)
        self.doubles += 1

    @rule(total=st.integers(1, 120), seqs=st.integers(1, 10))
    def shrink_or_grow(self, total: int, seqs: int) -> None:
        self.ledger.resize(pool(total, seqs))
        self.usable, self.slots = total, seqs

    @invariant()
    def books_agree(self) -> None:
        held, slots = self.sums()
        assert (self.ledger.reserved_blocks, self.ledger.reserved_seqs) == (held, slots)
        assert list(self.ledger) == [key for key, _, _ in self.naive]
        assert [self.ledger.held(key) for key in self.ledger] == [b for _, b, _ in self.naive]
        assert self.ledger.free_blocks == max(0, self.usable - held)
        assert self.ledger.double_releases == self.doubles
        self.ledger.recount()


TestAgainstANaiveList = AgainstANaiveList.TestCase
TestAgainstANaiveList.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
