"""The core around your own generate function: no gateway, no HTTP, one event loop.

Eight requests want 500 tokens of KV cache each, and the pool has 1,843 usable: at most three run at
once, the others wait in line, and nobody is cut off. Run it: python examples/library.py
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvgate.core.gate import Gate
from kvgate.core.records import Ask, Ending, Granted, Key, PoolFacts, Queued, Refused


class Busy(Exception):
    """There was no room in time, or there never will be; `refused` says which and what would fit."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(f"{refused.reason}: come back in {refused.retry_after} s")
        self.refused = refused


class Admission:
    """Carries the gate's answers to the tasks that wait for them."""

    def __init__(self, facts: PoolFacts) -> None:
        self.gate = Gate(facts)
        self.waiting: dict[Key, asyncio.Future[Granted | Refused]] = {}

    @asynccontextmanager
    async def admitted(self, ask: Ask) -> AsyncIterator[Granted]:
        """Holds the reservation for the length of the block, however the block ends."""
        answer = self.gate.ask(ask, time.monotonic())
        if isinstance(answer, Queued):
            answer = await self._wait(answer)
        if isinstance(answer, Refused):
            raise Busy(answer)
        ending = Ending.FAILED
        try:
            yield answer
            ending = Ending.COMPLETED
        except asyncio.CancelledError:
            ending = Ending.CANCELLED
            raise
        finally:
            self._deliver(self.gate.ended(answer.key, ending, time.monotonic()))

    async def _wait(self, queued: Queued) -> Granted | Refused:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Granted | Refused] = loop.create_future()
        self.waiting[queued.key] = future
        timer = loop.call_later(max(0.0, queued.deadline - time.monotonic()), self._tick)
        try:
            return await future
        except asyncio.CancelledError:
            # Gone while in the line, or granted in the same instant: `ended` is right for both.
            # One who was refused in that instant holds nothing.
            if queued.key in self.waiting:
                self._deliver(self.gate.ended(queued.key, Ending.CANCELLED, time.monotonic()))
            raise
        finally:
            timer.cancel()
            self.waiting.pop(queued.key, None)

    def _tick(self) -> None:
        self._deliver(self.gate.tick(time.monotonic()))

    def _deliver(self, answers: list[Granted | Refused]) -> None:
        for answer in answers:
            assert answer.key is not None  # answers to waiters always carry their key
            future = self.waiting[answer.key]
            if isinstance(answer, Refused):
                del self.waiting[answer.key]
            if not future.done():
                future.set_result(answer)


async def generate(prompt_tokens: int, max_tokens: int) -> str:
    """Stands in for your model. It must honour max_tokens: that is what was reserved."""
    await asyncio.sleep(max_tokens / 4000)
    return f"an answer of at most {max_tokens} tokens"


async def main() -> None:
    admission = Admission(PoolFacts(total_blocks=2048, block_size=1, context=2048, max_seqs=8))
    most = 0

    async def one(number: int) -> None:
        nonlocal most
        async with admission.admitted(Ask(prompts=(101,), output_cap=400, max_wait=30.0)) as granted:
            most = max(most, len(admission.gate.ledger))
            await generate(101, granted.output_cap)
            print(f"request {number}: {granted.blocks} blocks, waited {granted.waited:.2f} s")

    await asyncio.gather(*(one(number) for number in range(8)))
    print(f"at most {most} at once, {admission.gate.ledger.reserved_blocks} blocks reserved at the end")

    try:
        async with admission.admitted(Ask(prompts=(101,))):  # no cap: the rest of the context
            pass
    except Busy as busy:
        refused = busy.refused
        print(
            f"without a cap it needs {refused.needed_tokens} of {refused.usable_tokens} tokens "
            f"({refused.reason}); a cap of {refused.output_cap_that_fits} would fit"
        )


if __name__ == "__main__":
    asyncio.run(main())
