"""The library around your own generate function: no gateway, no HTTP.

Eight requests want 500 tokens of KV cache each, and the pool has 1,843 usable: at most three run at
once, the others wait in line, and nobody is cut off. Run it: python examples/library.py
"""

from __future__ import annotations

import asyncio

from kvgate import Admission, AdmissionRefused


async def generate(prompt_tokens: int, max_tokens: int) -> str:
    """Stands in for your model. It must honour max_tokens: that is what was reserved."""
    await asyncio.sleep(max_tokens / 4000)
    return f"an answer of at most {max_tokens} tokens"


async def main() -> None:
    admission = Admission.from_blocks(total_blocks=2048, block_size=1, context=2048, max_seqs=8)
    most = 0

    async def one(number: int) -> None:
        nonlocal most
        async with admission.admit(prompt_tokens=101, max_tokens=400, max_wait=30) as ticket:
            most = max(most, admission.snapshot()["live"])
            await generate(101, ticket.output_cap)
            print(f"request {number}: {ticket.blocks} blocks, waited {ticket.waited:.2f} s")

    await asyncio.gather(*(one(number) for number in range(8)))
    print(f"at most {most} at once, {admission.snapshot()['reserved_blocks']} blocks reserved at the end")

    try:
        async with admission.admit(prompt_tokens=101):  # no cap: the rest of the context
            pass
    except AdmissionRefused as error:
        refused = error.refused
        print(
            f"without a cap it needs {refused.needed_tokens} of {refused.usable_tokens} tokens "
            f"({refused.reason}); a cap of {refused.output_cap_that_fits} would fit"
        )


if __name__ == "__main__":
    asyncio.run(main())
