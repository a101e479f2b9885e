"""What is told of a priced request when it is over: to telemetry, logs and whoever observes.

`None` means that the figure is not known: the engine said nothing about its use, or the request
never held a reservation. Nothing here decides anything.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)  # not frozen: that makes its fields cost 2 us on each request
class Finished:
    """A priced request that has been answered, or whose client has gone. Times in seconds.

    `used_tokens`: prompt and new tokens, as the engine reported them in `usage`.
    `priced_tokens`: the most it was allowed to reach: over all its sequences, prompt + output cap.
    `reserved_tokens`: the blocks that were held for that, in tokens (rounded up per sequence).
    `counted_prompt`, `engine_prompt`: prompt tokens as counted before, and as the engine says.
    `tenant`: the name of whoever asked; empty where nobody is told apart, or it was not known yet.
    """

    outcome: str
    seconds: float
    wait_seconds: float
    used_tokens: int | None = None
    priced_tokens: int | None = None
    reserved_tokens: int | None = None
    counted_prompt: int | None = None
    engine_prompt: int | None = None
    tenant: str = ""
