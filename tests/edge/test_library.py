"""The library in coroutines and threads: what is held, what is told, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import trio

from kvgate import (
    Admission,
    AdmissionRefused,
    CapRules,
    Misuse,
    PoolFacts,
    Reason,
    Tenant,
    ThreadAdmission,
    Ticket,
    UnknownGeometry,
    kv_bytes_per_token,
)

SEED = 20261130
EMPTY = {"reserved_blocks": 0, "live": 0, "waiting": 0, "lingering": 0, "double_releases": 0}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def pool(blocks: int = 100, **options: Any) -> Admission:
    return Admission.from_blocks(blocks, 1, 1000, safety_fraction=1.0, **options)


async def _until_waiting(admission: Admission, number: int) -> None:
    while admission.snapshot()["waiting"] < number:  # noqa: ASYNC110
        await asyncio.sleep(0)


def assert_empty(admission: Admission | ThreadAdmission, note: object = "") -> None:
    snapshot = admission.snapshot()
    assert {name: snapshot[name] for name in EMPTY} == EMPTY, note


async def test_a_ticket_holds_what_the_request_may_reach() -> None:
    admission = pool()
    async with admission.admit(prompt_tokens=10, max_tokens=51) as ticket:
        assert (ticket.blocks, ticket.output_cap, ticket.sequences, ticket.waited) == (60, 51, 1, 0.0)
        assert admission.snapshot()["reserved_blocks"] == 60
    assert_empty(admission)


async def test_an_unset_cap_is_the_rest_of_the_context_or_the_operators_default() -> None:
    async with Admission.from_blocks(1000, 1, 100).admit(10) as ticket:
        assert ticket.output_cap == 90
    ruled = Admission.from_blocks(1000, 1, 100, rules=CapRules(default=20, ceiling=30))
    async with ruled.admit(10) as ticket, ruled.admit(10, 50) as other:
        assert (ticket.output_cap, other.output_cap) == (20, 30)


async def test_several_prompts_and_choices_are_reserved_together() -> None:
    async with pool().admit([10, 5], 5, n=2) as ticket:
        assert (ticket.blocks, ticket.sequences) == (2 * (14 + 9), 4)


async def test_a_refusal_carries_what_the_gateway_would_answer() -> None:
    admission = pool(busy_status=503)
    async with admission.admit(10, 51):
        with pytest.raises(AdmissionRefused) as caught:
            await admission.admit(10, 51).__aenter__()
    busy = caught.value
    assert (busy.reason, busy.status, busy.output_cap_that_fits) == (Reason.KV_CAPACITY, 503, 31)
    assert busy.retry_after is not None
    assert 1 <= busy.retry_after <= 60
    assert busy.headers["x-kvgate-reason"] == "kv_capacity"
    assert 1 <= int(busy.headers["retry-after"]) <= 60
    error = json.loads(busy.body())["error"]
    assert (error["code"], error["needed_tokens"], error["free_tokens"]) == ("kv_capacity", 60, 40)
    assert json.loads(busy.body("anthropic"))["type"] == "error"
    assert "With max_tokens of 31 or less" in str(busy)
    with pytest.raises(AdmissionRefused) as caught:
        await admission.admit(1000, 1).__aenter__()
    never = caught.value
    assert (never.status, never.reason, never.retry_after) == (413, Reason.CONTEXT_LENGTH_EXCEEDED, None)
    assert "retry-after" not in never.headers
    assert_empty(admission)


async def test_who_waits_gets_in_when_another_leaves() -> None:
    admission = pool()
    inside = asyncio.Event()

    async def holder() -> None:
        async with admission.admit(10, 51):
            inside.set()
            await _until_waiting(admission, 1)

    async def waiter() -> float:
        await inside.wait()
        async with admission.admit(10, 51, max_wait=30) as ticket:
            return ticket.waited

    _, waited = await asyncio.gather(holder(), waiter())
    assert waited > 0
    assert_empty(admission)


async def test_who_waits_for_too_long_is_refused_with_the_time_out() -> None:
    admission = pool()
    async with admission.admit(10, 51):
        with pytest.raises(AdmissionRefused) as caught:
            await admission.admit(10, 51, max_wait=0.02).__aenter__()
    assert caught.value.reason is Reason.QUEUE_TIMEOUT
    assert_empty(admission)


async def test_settling_gives_back_what_the_estimate_was_too_high_and_lets_others_in() -> None:
    admission = pool()
    async with admission.admit(50, 41) as ticket:
        assert ticket.settle(20) == 60
        async with admission.admit(10, 31):
            assert admission.snapshot()["free_blocks"] == 0
        with pytest.raises(Misuse):
            ticket.settle(21)
        with pytest.raises(Misuse):
            ticket.settle((20, 20))
        assert admission.snapshot()["reserved_blocks"] == 60
    assert_empty(admission)


async def test_an_admission_is_entered_once() -> None:
    admission = pool()
    once = admission.admit(10, 5)
    async with once:
        pass
    with pytest.raises(Misuse):
        await once.__aenter__()
    assert_empty(admission)


async def test_a_failed_block_is_held_for_the_abort_grace_and_then_lets_the_next_in() -> None:
    admission = pool(abort_grace=0.05)
    with pytest.raises(ZeroDivisionError):
        async with admission.admit(10, 91):
            raise ZeroDivisionError
    assert admission.snapshot()["reserved_blocks"] == 100
    async with admission.admit(10, 91, max_wait=30) as ticket:
        assert ticket.waited >= 0.04
    assert_empty(admission)


async def test_one_who_waited_before_the_grace_began_is_woken_when_it_is_over() -> None:
    admission = pool(abort_grace=0.05)

    async def fails() -> None:
        async with admission.admit(10, 91):
            await _until_waiting(admission, 3)
            raise ZeroDivisionError

    async def waits() -> None:
        async with admission.admit(10, 91, max_wait=30):
            pass

    async with asyncio.timeout(10):
        failing = asyncio.create_task(fails())
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(waits()) for _ in range(3)]
        with pytest.raises(ZeroDivisionError):
            await failing
        # The one that was told to watch the time leaves; another must take over.
        waiting[0].cancel()
        await asyncio.gather(*waiting[1:])
    assert_empty(admission)


async def test_tenants_are_told_apart_by_name_or_by_record() -> None:
    admission = pool()
    limited = Tenant("small", ceiling=30)
    async with admission.admit(10, 11, tenant=limited), admission.admit(10, 11, tenant="other"):
        with pytest.raises(AdmissionRefused) as caught:
            await admission.admit(10, 11, tenant=limited).__aenter__()
    assert caught.value.reason is Reason.TENANT_LIMIT


async def test_a_guarded_function_is_admitted_at_each_call() -> None:
    admission = pool()

    @admission.guard(lambda prompt, max_tokens: (len(prompt), max_tokens))
    async def generate(prompt: str, max_tokens: int, *, ticket: Ticket) -> int:
        return ticket.output_cap + admission.snapshot()["reserved_blocks"]

    @admission.threads.guard(lambda prompt: len(prompt))
    def whole(prompt: str, *, ticket: Ticket) -> int:
        return ticket.output_cap

    assert await generate("hello", 20) == 20 + 24
    with pytest.raises(AdmissionRefused):
        await asyncio.to_thread(whole, "hello")
    with pytest.raises(Misuse):
        admission.guard(lambda: 1)(whole)  # type: ignore[arg-type]
    with pytest.raises(Misuse):
        admission.threads.guard(lambda: 1)(generate)
    assert_empty(admission)


def test_capacity_comes_from_memory_and_from_the_models_configuration(tmp_path: Any) -> None:
    each = kv_bytes_per_token(32, 8, 128)
    assert Admission.from_memory(1000 * each + 5, each, 100).snapshot()["usable_blocks"] == 900
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for config in (LLAMA, tmp_path, str(tmp_path / "config.json")):
        facts = ThreadAdmission.from_config(config, 161 * 16 * each, max_seqs=8).facts
        # One block is the engine's null block.
        assert (facts.total_blocks, facts.block_size, facts.context, facts.max_seqs) == (160, 16, 8192, 8)
    with pytest.raises(UnknownGeometry):
        Admission.from_config({"model_type": "nobody knows"}, 1 << 30)
    with pytest.raises(Misuse):
        Admission.from_memory(10, 100, 100)


def test_the_explanation_says_whether_it_would_fit_and_changes_nothing() -> None:
    admission = pool()
    assert admission.explain(10, 51) == "It would be admitted now: 60 blocks, an output cap of 51."
    assert "never has more than 100" in admission.explain(10, 200)
    assert_empty(admission)


# --- anyio, trio, threads


async def _three_take_turns(admission: Admission) -> None:
    most = 0

    async def one() -> None:
        nonlocal most
        async with admission.admit(10, 91, max_wait=30):
            most = max(most, admission.snapshot()["live"])
            await anyio.sleep(0.001)

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(one)
    assert most == 1
    with anyio.move_on_after(0.01):
        async with admission.admit(10, 91), admission.admit(10, 91, max_wait=30):
            raise AssertionError("there is no room")
    assert_empty(admission)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_it_works_with_anyio_on_either_backend(backend: str) -> None:
    anyio.run(_three_take_turns, pool(), backend=backend)


def test_threads_asyncio_and_trio_share_one_pool() -> None:
    admission = pool()
    served = []

    async def many(name: str) -> None:
        for _ in range(20):
            async with admission.admit(10, 91, max_wait=30):
                served.append(name)
                await anyio.lowlevel.checkpoint()

    def in_threads() -> None:
        for _ in range(20):
            with admission.threads.admit(10, 91, max_wait=30):
                served.append("thread")

    workers = [
        threading.Thread(target=anyio.run, args=(many, "asyncio"), kwargs={"backend": "asyncio"}),
        threading.Thread(target=anyio.run, args=(many, "trio"), kwargs={"backend": "trio"}),
        threading.Thread(target=in_threads),
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert not any(worker.is_alive() for worker in workers)
    assert {name: served.count(name) for name in set(served)} == {"asyncio": 20, "trio": 20, "thread": 20}
    assert_empty(admission)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_what_was_granted_to_a_loop_that_is_gone_is_given_back(backend: str) -> None:
    admission = pool()
    waiting: list[Coroutine[Any, Any, Any]] = []

    @types.coroutine
    def abandon() -> Generator[Any, Any, None]:
        """Take the first step of a wait, and let the loop end with nobody to resume it."""
        coroutine = admission.admit(10, 91, max_wait=1000).__aenter__()
        coroutine.send(None)
        waiting.append(coroutine)
        return
        yield

    async def leave_one_waiting() -> None:
        await abandon()

    with admission.threads.admit(10, 91):
        if backend == "asyncio":
            asyncio.run(leave_one_waiting())
        else:
            _run_trio_step(admission, waiting)
        assert admission.snapshot()["waiting"] == 1
    assert_empty(admission)
    waiting[0].close()
    assert_empty(admission)


def _run_trio_step(admission: Admission, waiting: list[Coroutine[Any, Any, Any]]) -> None:
    from kvgate.core.records import Ask
    from kvgate.edge.library.bells import TrioBell
    from kvgate.edge.library.turnstile import Seat

    async def main() -> None:
        seat = admission._turnstile.ask(Ask((10,), 91, max_wait=1000), TrioBell)
        assert isinstance(seat, Seat)

    async def nothing() -> None: ...

    trio.run(main)
    waiting.append(nothing())


# --- cancellation at every suspension point


class Injected(BaseException):
    """Stands for any cancellation."""


@types.coroutine
def injected(
    coroutine: Coroutine[Any, Any, None], at: int, error: type[BaseException]
) -> Generator[Any, Any, bool]:
    """Run `coroutine`, and throw `error` into it when it would be resumed for the `at`-th time: the
    moment when what it waited for has happened and it does not know yet. True where that came."""
    resume: Callable[[], Any] = lambda: coroutine.send(None)  # noqa: E731
    step = 0
    while True:
        try:
            waits_for = resume()
        except StopIteration:
            return False
        except error:
            return True
        step += 1
        try:
            value = yield waits_for
        except BaseException as raised:
            resume = lambda raised=raised: coroutine.throw(raised)  # type: ignore[misc] # noqa: E731
            continue
        if step == at:
            resume = lambda: coroutine.throw(error())  # noqa: E731
        else:
            resume = lambda value=value: coroutine.send(value)  # type: ignore[misc] # noqa: E731


async def _request(admission: Admission, draw: random.Random, pause: Callable[[], Awaitable[None]]) -> None:
    waits = draw.choice([0.0, 0.0005, *[30.0] * 6])
    try:
        async with admission.admit(draw.randint(1, 40), draw.randint(1, 60), max_wait=waits) as ticket:
            for _ in range(draw.randint(1, 5)):
                await pause()
            if draw.random() < 0.2:
                raise ValueError
            if draw.random() < 0.3:
                ticket.settle(1)
            await pause()
    except (AdmissionRefused, ValueError):
        pass


SCHEDULES = 1500


def test_asyncio_cancelled_at_every_suspension_leaves_nothing() -> None:
    hits = 0

    async def schedule(seed: int) -> None:
        nonlocal hits
        draw = random.Random(seed)
        admission = pool(abort_grace=draw.choice([0.0, 0.0, 0.001]))
        tasks, requests = [], []
        for number in range(8):
            one = _request(admission, random.Random(f"{seed}/{number}"), lambda: asyncio.sleep(0))
            at = draw.randint(1, 5)
            error = draw.choice([Injected, asyncio.CancelledError])
            requests.append(one)
            tasks.append(asyncio.create_task(_hit(one, at, error)))
        for _ in range(draw.randrange(12)):
            await asyncio.sleep(0)
        for task in tasks:
            if draw.random() < 0.3:
                task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            hits += result is not False
        for one in requests:
            one.close()  # those that were cancelled before their first step
        await _until_empty(admission, asyncio.sleep)
        assert_empty(admission, f"seed {seed}")

    async def _hit(one: Coroutine[Any, Any, None], at: int, error: type[BaseException]) -> bool:
        return await injected(one, at, error)

    async def all_of_them() -> None:
        for number in range(SCHEDULES):
            async with asyncio.timeout(30):
                await schedule(SEED + number)

    asyncio.run(all_of_them())
    assert hits > SCHEDULES


def test_trio_cancelled_at_every_suspension_leaves_nothing() -> None:
    hits = 0

    async def schedule(seed: int) -> None:
        nonlocal hits
        draw = random.Random(seed)
        admission = pool(abort_grace=draw.choice([0.0, 0.0, 0.001]))
        scopes: list[trio.CancelScope] = []

        async def one(number: int, at: int, scope: trio.CancelScope) -> None:
            nonlocal hits
            request = _request(admission, random.Random(f"{seed}/{number}"), trio.lowlevel.checkpoint)
            with scope:
                was_hit = await injected(request, at, Injected)
                hits += was_hit
            hits += scope.cancelled_caught

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                for number in range(8):
                    scopes.append(trio.CancelScope())
                    nursery.start_soon(one, number, draw.randint(1, 5), scopes[-1])
                for _ in range(draw.randrange(12)):
                    await trio.lowlevel.checkpoint()
                for scope in scopes:
                    if draw.random() < 0.3:
                        scope.cancel()
            await _until_empty(admission, trio.sleep)
        assert_empty(admission, f"seed {seed}")

    async def all_of_them() -> None:
        for number in range(SCHEDULES):
            await schedule(SEED + number)

    trio.run(all_of_them)
    assert hits > SCHEDULES


async def _until_empty(admission: Admission, sleep: Callable[[float], Awaitable[None]]) -> None:
    """A grace of a millisecond may still run."""
    while admission.snapshot()["lingering"]:
        await sleep(0.001)


def test_a_defect_of_that_kind_would_be_found() -> None:
    """The same injection into a gate that gives back only in the ordinary way."""

    async def naive(admission: Admission) -> None:
        admitting = admission.admit(10, 20)
        await admitting.__aenter__()
        await asyncio.sleep(0)
        await admitting.__aexit__(None, None, None)

    async def main() -> int:
        admission = pool()
        await injected(naive(admission), 1, Injected)
        return admission.snapshot()["reserved_blocks"]

    assert asyncio.run(main()) == 29


async def test_the_next_watches_the_time_when_the_one_that_did_is_let_in() -> None:
    admission = pool(abort_grace=0.05)

    async def one(cap: int, max_wait: float = 0.0) -> None:
        async with admission.admit(10, cap, max_wait=max_wait) as ticket:
            if not ticket.waited:
                await _until_waiting(admission, 2)
            if cap == 61:
                raise ZeroDivisionError

    async with asyncio.timeout(10):
        large, small = asyncio.create_task(one(61)), asyncio.create_task(one(21))
        await asyncio.sleep(0)
        # The first of them fits into what the small one leaves, before the grace of the large is over.
        await asyncio.gather(one(21, 30), one(61, 30), small, return_exceptions=True)
        with pytest.raises(ZeroDivisionError):
            await large
    await _until_empty(admission, asyncio.sleep)
    assert_empty(admission)


def test_sixty_four_threads_wait_fail_and_leave_nothing() -> None:
    admission = ThreadAdmission(PoolFacts(2000, 1, 1000, safety_fraction=1.0))
    over: list[int] = []

    def work(number: int) -> None:
        draw = random.Random(SEED + number)
        for _ in range(100):
            waits = draw.choice([0.0, 0.001, 30.0])
            try:
                with admission.admit(draw.randint(1, 200), draw.randint(1, 300), max_wait=waits):
                    if admission.snapshot()["free_blocks"] < 0:
                        over.append(number)
                    if draw.random() < 0.2:
                        raise ValueError
            except (AdmissionRefused, ValueError):
                pass

    threads = [threading.Thread(target=work, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert over == []
    assert admission.snapshot()["admissions"] > 64
    assert_empty(admission)
