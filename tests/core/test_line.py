"""The line keeps order, lets anybody leave, and knows its deadlines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.line import Line, Waiter
from kvgate.core.records import Ask, Price


def waiter(key: int, deadline: float = 10.0, blocks: int = 1) -> Waiter:
    return Waiter(key, Ask((1,)), Price(blocks, 1, 1), since=0.0, deadline=deadline)


def line_of(*waiters: Waiter, limit: int = 100) -> Line:
    line = Line(limit)
    for each in waiters:
        line.join(each)
    return line


def test_the_first_to_come_is_the_head() -> None:
    line = line_of(waiter(5), waiter(2), waiter(9))
    served = []
    while (head := line.head()) is not None:
        served.append(head.key)
        line.leave(head.key)
    assert served == [5, 2, 9]


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
    assert line.head() is None
    assert line.next_deadline() is None
    assert line.expired(1e9) == []
    assert not line


def test_it_is_full_at_its_limit() -> None:
    line = line_of(waiter(1), limit=2)
    assert not line.is_full
    line.join(waiter(2))
    assert line.is_full
    line.leave(1)
    assert not line.is_full


def test_the_expired_are_those_whose_deadline_has_come_and_they_still_wait() -> None:
    line = line_of(waiter(1, 5.0), waiter(2, 3.0), waiter(3, 4.0))
    assert [w.key for w in line.expired(2.9)] == []
    assert [w.key for w in line.expired(4.0)] == [2, 3]
    assert len(line) == 3
    assert line.next_deadline() == 3.0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 15), st.integers(0, 9))))
def test_it_is_the_same_as_a_list(moves: list[tuple[bool, int, int]]) -> None:
    line = Line(1000)
    naive: list[Waiter] = []
    for joins, key, blocks in moves:
        if joins and all(w.key != key for w in naive):
            naive.append(waiter(key, deadline=float(key), blocks=blocks))
            line.join(naive[-1])
        else:
            gone = next((w for w in naive if w.key == key), None)
            assert line.leave(key) is gone
            naive = [w for w in naive if w.key != key]
        assert list(line) == naive
        assert line.head() is (naive[0] if naive else None)
        assert line.blocks == sum(w.price.blocks for w in naive)
        assert line.next_deadline() == min((w.deadline for w in naive), default=None)
