"""The line keeps order, lets anybody leave, and knows its deadlines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.accounts import Waiter
from kvgate.core.line import Line
from kvgate.core.records import Ask, Price


def waiter(key: int, deadline: float = 10.0, blocks: int = 1) -> Waiter:
    return Waiter(
        key, Ask((1,)), Price(blocks, 1, 1), blocks, 1, joined=0.0, deadline=deadline, place=float(key)
    )


def line_of(*waiters: Waiter, limit: int = 100) -> Line:
    line = Line(limit)
    for each in waiters:
        line.join(each)
    return line


def test_the_first_to_come_is_the_head() -> None:
    line = line_of(waiter(2), waiter(5), waiter(9))
    served = []
    while (head := line.shares.head(100)) is not None:
        served.append(head.key)
        line.leave(head.key)
    assert served == [2, 5, 9]


def test_anybody_can_leave_from_the_middle_once() -> None:
    line = line_of(waiter(1), waiter(2, blocks=7), waiter(3))
    left = line.leave(2)
    assert left is not None
    assert left.key == 2
    assert line.leave(2) is None
    assert [w.key for w in line] == [1, 3]
    assert line.blocks == 2


def test_an_empty_line_has_no_head_and_no_deadline() -> None:
    line = line_of()
    assert line.shares.head(100) is None
    assert line.next_deadline() is None
    assert line.take_expired(1e9) == []
    assert not line


def test_it_is_full_at_its_limit() -> None:
    line = line_of(waiter(1), limit=2)
    assert line.has_room_for(Ask((1,)), 1)
    line.join(waiter(2))
    assert not line.has_room_for(Ask((1,)), 1)
    line.leave(1)
    assert line.has_room_for(Ask((1,)), 1)


def test_it_is_full_at_its_limit_of_blocks() -> None:
    line = Line(100, blocks_limit=10)
    line.join(waiter(1, blocks=7))
    assert line.has_room_for(Ask((1,)), 3)
    assert not line.has_room_for(Ask((1,)), 4)


def test_the_expired_are_those_whose_deadline_has_come_and_they_are_taken_out() -> None:
    line = line_of(waiter(1, 5.0), waiter(2, 3.0), waiter(3, 4.0))
    assert line.take_expired(2.9) == []
    assert [w.key for w in line.take_expired(4.0)] == [2, 3]
    assert len(line) == 1
    assert line.next_deadline() == 5.0


def test_one_that_leaves_and_joins_again_expires_once() -> None:
    line = line_of(waiter(1, 5.0))
    line.leave(1)
    line.join(waiter(1, 5.0))
    assert [w.key for w in line.take_expired(5.0)] == [1]
    assert line.take_expired(5.0) == []


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 15), st.integers(0, 9))))
def test_it_is_the_same_as_a_list(moves: list[tuple[bool, int, int]]) -> None:
    line = Line(1000)
    naive: list[Waiter] = []
    head: Waiter | None = None
    for joins, key, blocks in moves:
        if joins and all(w.key != key for w in naive):
            naive.append(waiter(key, deadline=float(key), blocks=blocks))
            line.join(naive[-1])
        else:
            gone = next((w for w in naive if w.key == key), None)
            assert line.leave(key) is gone
            naive = [w for w in naive if w.key != key]
        assert list(line) == naive
        if head is None or head not in naive:
            head = min(naive, key=lambda w: w.key, default=None)  # a head stays one
        assert line.shares.head(100) is head
        assert line.blocks == sum(w.blocks for w in naive)
        assert line.next_deadline() == min((w.deadline for w in naive), default=None)
