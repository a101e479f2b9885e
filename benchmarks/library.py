"""What the library costs: reservations a second, from one thread and from 64, and by coroutines.

    python benchmarks/library.py [--quick]

Every run ends with its law: nothing is reserved, and nothing was released twice.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import threading
import time
from collections.abc import Callable

from kvgate import Admission, AdmissionRefused, KVAdmissionController, PoolFacts, ThreadAdmission

SEED = 20261130
FACTS = PoolFacts(total_blocks=65_536, block_size=16, context=8192)


def in_threads(threads: int, work: Callable[[int], int]) -> tuple[int, float]:
    """(reservations, seconds)."""
    done = [0] * threads

    def run(number: int) -> None:
        done[number] = work(number)

    workers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    started = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(done), time.perf_counter() - started


def controller(threads: int, each: int) -> tuple[int, float]:
    books = KVAdmissionController(10_000_000, 1)

    def work(number: int) -> int:
        draw, admitted = random.Random(SEED + number), 0
        for _ in range(each):
            handle = books.try_admit(draw.randrange(2000), draw.randint(1, 8000))
            if handle is None:
                continue
            admitted += 1
            try:
                with handle:
                    if draw.random() < 0.1:
                        raise RuntimeError
            except RuntimeError:
                pass
        return admitted

    found = in_threads(threads, work)
    assert (books.reserved_bytes, books.double_releases) == (0, 0)
    return found


def in_line(threads: int, each: int) -> tuple[int, float]:
    admission = ThreadAdmission(FACTS)

    def work(number: int) -> int:
        draw, admitted = random.Random(SEED + number), 0
        for _ in range(each):
            try:
                with admission.admit(draw.randint(1, 2000), draw.randint(1, 2000), max_wait=30):
                    admitted += 1
                    if draw.random() < 0.1:
                        raise RuntimeError
            except (RuntimeError, AdmissionRefused):
                pass
        return admitted

    found = in_threads(threads, work)
    assert (admission.snapshot()["reserved_blocks"], admission.snapshot()["double_releases"]) == (0, 0)
    return found


def coroutines(tasks: int, each: int) -> tuple[int, float]:
    admission = Admission(FACTS)

    async def one(number: int) -> int:
        draw = random.Random(SEED + number)
        for _ in range(each):
            async with admission.admit(draw.randint(1, 2000), draw.randint(1, 2000), max_wait=300):
                await asyncio.sleep(0)
        return each

    async def all_of_them() -> int:
        return sum(await asyncio.gather(*(one(number) for number in range(tasks))))

    started = time.perf_counter()
    admitted = asyncio.run(all_of_them())
    seconds = time.perf_counter() - started
    assert admission.snapshot()["reserved_blocks"] == 0
    return admitted, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a twentieth of the work")
    scale = 20 if parser.parse_args().quick else 1
    print(f"seed {SEED}")
    for name, run, parties, each in (
        ("KVAdmissionController, 1 thread", controller, 1, 200_000),
        ("KVAdmissionController, 64 threads x 10,000", controller, 64, 10_000),
        ("ThreadAdmission, 1 thread", in_line, 1, 40_000),
        ("ThreadAdmission, 64 threads x 1,000", in_line, 64, 1_000),
        ("Admission, 1 coroutine", coroutines, 1, 40_000),
        ("Admission, 64 coroutines x 1,000", coroutines, 64, 1_000),
    ):
        admitted, seconds = run(parties, each // scale)
        print(f"{name:46} {admitted:8,} admitted  {admitted / seconds:10,.0f}/s  {seconds:6.2f} s")


if __name__ == "__main__":
    main()
