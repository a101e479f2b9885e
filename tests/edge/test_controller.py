"""The classic interface: exact books, handles that count once, any number of threads."""

from __future__ import annotations

import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate import (
    KVAdmissionController,
    KVReservation,
    Misuse,
    effective_output_cap,
    kv_bytes_per_token,
    request_reservation_bytes,
    request_reservation_tokens,
)

SEED = 20261130


def test_what_fits_is_admitted_until_the_usable_part_is_full() -> None:
    controller = KVAdmissionController(total_kv_bytes=1000, per_token_bytes=2)
    assert controller.usable_bytes == 900
    first = controller.try_admit(prompt_tokens=100, output_cap=200)
    assert first is not None
    assert (first.tokens, first.bytes, controller.reserved_bytes) == (300, 600, 600)
    assert controller.try_admit(100, 51) is None
    assert controller.free_tokens == 150
    assert controller.try_admit(100, 50) is not None
    assert controller.free_bytes == 0


def test_a_handle_is_released_once_and_a_second_time_is_counted() -> None:
    controller = KVAdmissionController(1000, 1)
    one, two = controller.try_admit(100, 100), controller.try_admit(100, 100)
    assert one is not None
    assert two is not None
    assert controller.release(one) is True
    assert controller.release(one) is False
    assert (controller.reserved_bytes, controller.double_releases, len(controller)) == (200, 1, 1)
    assert (one.is_released, two.is_released) == (True, False)
    assert two.release() is True
    assert controller.reserved_bytes == 0


def test_a_handle_gives_back_at_the_end_of_its_block_however_that_ends() -> None:
    controller = KVAdmissionController(1000, 1)
    handle = controller.try_admit(100, 100)
    assert handle is not None
    with pytest.raises(ZeroDivisionError), handle:
        raise ZeroDivisionError
    assert (controller.reserved_bytes, controller.double_releases) == (0, 0)
    again = controller.try_admit(100, 100)
    assert again is not None
    with again:
        again.release()
    assert (controller.reserved_bytes, controller.double_releases) == (0, 0)


def test_misuse_is_refused() -> None:
    one, two = KVAdmissionController(1000, 1), KVAdmissionController(1000, 1)
    handle = one.try_admit(1, 1)
    assert handle is not None
    for wrong in (
        lambda: two.release(handle),
        lambda: one.try_admit(-1, 1),
        lambda: one.try_admit(1, 0),
        lambda: KVAdmissionController(0, 1),
        lambda: KVAdmissionController(1000, 0),
        lambda: KVAdmissionController(1000, 1, safety_fraction=0.0),
        lambda: KVAdmissionController(1000, 1, safety_fraction=1.1),
        lambda: request_reservation_bytes(1, 1, 0),
    ):
        with pytest.raises(Misuse):
            wrong()
    assert two.reserved_bytes == 0


def test_what_can_never_fit_is_told_apart_from_what_does_not_fit_now() -> None:
    controller = KVAdmissionController(1000, 1)
    assert controller.try_admit(400, 400) is not None
    assert controller.try_admit(400, 400) is None
    assert controller.can_ever_fit(400, 400)
    assert not controller.can_ever_fit(400, 501)


def test_the_formulas_are_those_of_a_plain_model() -> None:
    assert kv_bytes_per_token(32, 8, 128, 2) == 131_072
    assert request_reservation_tokens(71, 600) == 671
    assert request_reservation_bytes(71, 600, 131_072) == 671 * 131_072
    assert effective_output_cap(None, 71, 2048) == 1977
    assert effective_output_cap(600, 2000, 2048) == 48
    assert effective_output_cap(600, 2048, 2048) is None


@given(
    st.integers(1, 10_000),
    st.floats(0.01, 1.0),
    st.lists(st.tuples(st.booleans(), st.integers(0, 300), st.integers(1, 300)), max_size=60),
)
def test_the_sum_never_passes_what_is_usable(
    total: int, fraction: float, steps: list[tuple[bool, int, int]]
) -> None:
    controller = KVAdmissionController(total, 3, fraction)
    held: list[KVReservation] = []
    for takes, prompt, cap in steps:
        if takes:
            fits = (prompt + cap) * 3 <= controller.free_bytes
            handle = controller.try_admit(prompt, cap)
            assert (handle is not None) == fits
            held += [handle] if handle is not None else []
        elif held:
            held.pop(prompt % len(held)).release()
        assert controller.reserved_bytes == sum(handle.bytes for handle in held)
        assert controller.reserved_bytes <= controller.usable_bytes <= total * fraction + 1e-6


def test_sixty_four_threads_with_random_failures_leave_nothing_reserved() -> None:
    """The full 64 x 10,000 are in benchmarks/library.py."""
    controller = KVAdmissionController(20_000, 1)
    over: list[int] = []
    admitted = [0] * 64

    def work(number: int) -> None:
        draw = random.Random(SEED + number)
        for _ in range(400):
            handle = controller.try_admit(draw.randrange(200), draw.randint(1, 400))
            if handle is None:
                continue
            admitted[number] += 1
            try:
                with handle:
                    if controller.reserved_bytes > controller.usable_bytes:
                        over.append(number)
                    if draw.random() < 0.3:
                        raise RuntimeError
                    if draw.random() < 0.3:
                        handle.release()
            except RuntimeError:
                pass

    threads = [threading.Thread(target=work, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert over == []
    assert min(admitted) > 0
    assert (controller.reserved_bytes, len(controller), controller.double_releases) == (0, 0, 0)
