"""The gate in a running loop: late answers, abort grace, grants that nobody receives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from kvgate.core.gate import Gate
from kvgate.core.records import Ask, Ending, Granted, PoolFacts, Reason, Refused
from kvgate.edge.gatekeeper import Gatekeeper

FACTS = PoolFacts(total_blocks=100, block_size=1, context=100, safety_fraction=1.0)
WHOLE = Ask(prompts=(1,), output_cap=100, max_wait=30.0)

Answers = list[Granted | Refused]


def in_a_loop(body: Callable[[Gatekeeper], Awaitable[None]]) -> None:
    async def run() -> None:
        await body(Gatekeeper(Gate(FACTS), asyncio.get_running_loop()))

    asyncio.run(run())


def granted(answers: Answers) -> Granted:
    (answer,) = answers
    assert isinstance(answer, Granted)
    return answer


async def settled(answers: Answers) -> None:
    """Wait, for a bounded time, until there is an answer."""
    for _ in range(1000):
        if answers:
            return
        await asyncio.sleep(0.005)


def test_a_request_that_fits_is_answered_before_ask_returns() -> None:
    async def body(keeper: Gatekeeper) -> None:
        answers: Answers = []
        assert keeper.ask(WHOLE, answers.append) is None
        granted(answers)

    in_a_loop(body)


def test_a_waiting_request_is_answered_when_the_reservation_before_it_ends() -> None:
    async def body(keeper: Gatekeeper) -> None:
        first: Answers = []
        second: Answers = []
        keeper.ask(WHOLE, first.append)
        assert keeper.ask(WHOLE, second.append) is not None
        assert second == []

        keeper.ended(granted(first).key, Ending.COMPLETED)

        granted(second)

    in_a_loop(body)


def test_an_abort_grace_holds_the_reservation_until_the_engine_has_let_go() -> None:
    async def body(keeper: Gatekeeper) -> None:
        first: Answers = []
        second: Answers = []
        keeper.ask(WHOLE, first.append)
        keeper.ask(WHOLE, second.append)

        keeper.ended(granted(first).key, Ending.CANCELLED, after=0.02)

        assert (keeper.lingering, second) == (1, [])
        await settled(second)
        granted(second)
        assert keeper.lingering == 0

    in_a_loop(body)


def test_who_leaves_the_line_is_never_answered_and_the_next_one_is() -> None:
    async def body(keeper: Gatekeeper) -> None:
        first: Answers = []
        gone: Answers = []
        third: Answers = []
        keeper.ask(WHOLE, first.append)
        key = keeper.ask(WHOLE, gone.append)
        keeper.ask(WHOLE, third.append)
        assert key is not None

        keeper.leave(key)
        keeper.ended(granted(first).key, Ending.COMPLETED)

        assert gone == []
        granted(third)

    in_a_loop(body)


def test_a_request_that_waited_until_its_deadline_is_refused_by_the_timer() -> None:
    async def body(keeper: Gatekeeper) -> None:
        first: Answers = []
        late: Answers = []
        keeper.ask(WHOLE, first.append)
        keeper.ask(Ask(prompts=(1,), output_cap=100, max_wait=0.02), late.append)
        await settled(late)

        (answer,) = late
        assert isinstance(answer, Refused)
        assert answer.reason is Reason.QUEUE_TIMEOUT

    in_a_loop(body)


@pytest.mark.parametrize("times", [2, 5])
def test_ending_a_reservation_again_changes_nothing_and_is_counted(times: int) -> None:
    async def body(keeper: Gatekeeper) -> None:
        first: Answers = []
        keeper.ask(WHOLE, first.append)
        for _ in range(times):
            keeper.ended(granted(first).key, Ending.COMPLETED)

        assert (0, times - 1) == (keeper.gate.ledger.reserved_blocks, keeper.gate.ledger.double_releases)

    in_a_loop(body)


def test_who_asks_is_worked_out_only_where_it_is_not_let_in_at_once() -> None:
    async def body(keeper: Gatekeeper) -> None:
        worked_out: list[Ask] = []

        def in_full(ask: Ask) -> Ask:
            worked_out.append(ask)
            return replace(ask, max_wait=0.0, identity=7)

        first: Answers = []
        second: Answers = []
        keeper.ask(WHOLE, first.append, in_full)
        assert worked_out == []
        assert keeper.ask(WHOLE, second.append, in_full) is None

        assert worked_out == [WHOLE]
        assert isinstance(second[0], Refused)
        assert len(keeper.gate.places) == 1
        keeper.ended(granted(first).key, Ending.COMPLETED)

    in_a_loop(body)


def test_one_that_cannot_take_its_answer_keeps_nobody_from_theirs() -> None:
    async def body(keeper: Gatekeeper) -> None:
        first: Answers = []
        second: Answers = []
        half = replace(WHOLE, output_cap=50)

        def fails(_: Granted | Refused) -> None:
            raise RuntimeError("the handle is closed")

        keeper.ask(WHOLE, first.append)
        keeper.ask(half, fails)
        keeper.ask(half, second.append)
        with pytest.raises(RuntimeError, match="the handle is closed"):
            keeper.ended(granted(first).key, Ending.COMPLETED)
        granted(second)

    in_a_loop(body)
