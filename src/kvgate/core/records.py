"""Everything that crosses the border of the core: questions, answers and facts.

Promises: no record changes once it is made (mypy sees to it), every answer is one of a closed set, and
the same words are used in the code, the metrics, the headers, the error bodies and the docs.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import TypeAlias

from kvgate.core.geometry.layout import KVLayout
from kvgate.core.record import record

Seconds: TypeAlias = float
"""Seconds on the caller's monotonic clock. The core never reads one."""

Key: TypeAlias = int
"""The gate's own number for one request. Never chosen by a client, never used twice."""


class Misuse(Exception):
    """The calling code is wrong: a released reservation, a negative size, a reused key."""


class Reason(enum.StrEnum):
    """Why a request was refused. The value is the `code` in bodies, headers and metrics."""

    KV_CAPACITY = "kv_capacity"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    TENANT_LIMIT = "tenant_limit"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    KV_CAPACITY_EXCEEDED = "kv_capacity_exceeded"
    INVALID_REQUEST = "invalid_request"
    BODY_TOO_LARGE = "body_too_large"
    UNPRICED_ENDPOINT = "unpriced_endpoint"
    MODEL_NOT_FOUND = "model_not_found"
    INVALID_API_KEY = "invalid_api_key"
    ENGINE_UNAVAILABLE = "engine_unavailable"
    DRAINING = "draining"

    @property
    def is_busy(self) -> bool:
        """True where the same request can succeed later."""
        return self in _BUSY


_BUSY = frozenset(
    {
        Reason.KV_CAPACITY,
        Reason.QUEUE_FULL,
        Reason.QUEUE_TIMEOUT,
        Reason.TENANT_LIMIT,
        Reason.ENGINE_UNAVAILABLE,
        Reason.DRAINING,
    }
)


class Ending(enum.StrEnum):
    """How an admitted request ended. Only `COMPLETED` teaches the forecast."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """One engine's KV memory, in the engine's own units.

    `total_blocks` blocks of `block_size` tokens; `context` tokens a sequence may reach;
    `max_seqs` sequences the engine runs at once (None: no limit); `lookahead` tokens of
    speculative decoding held beyond the answer. `geometry`: the groups of a model whose sequences
    take blocks from several of them (None: one full-attention group). `engine_context`: tokens beyond
    which the engine stores nothing, which may be more than `context` (None: not known).
    """

    total_blocks: int
    block_size: int
    context: int
    max_seqs: int | None = None
    safety_fraction: float = 0.90
    lookahead: int = 0
    engine: str = "generic"
    geometry: KVLayout | None = None
    most_fraction: float | None = None
    engine_context: int | None = None
    usable_blocks: int = field(init=False, repr=False, compare=False)
    """Blocks that may be reserved: `floor(total x safety_fraction)`, less what `geometry` keeps back."""
    most_blocks: int = field(init=False, repr=False, compare=False)
    """The same at `most_fraction`: what asks for more can never fit."""

    def __post_init__(self) -> None:
        for name in ("total_blocks", "block_size", "context"):
            if getattr(self, name) < 1:
                raise Misuse(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_seqs is not None and self.max_seqs < 1:
            raise Misuse(f"max_seqs must be at least 1 or None, got {self.max_seqs}")
        if not 0.0 < self.safety_fraction <= 1.0:
            raise Misuse(f"safety_fraction must be above 0 and at most 1, got {self.safety_fraction}")
        if self.lookahead < 0:
            raise Misuse(f"lookahead must not be negative, got {self.lookahead}")
        most = self.safety_fraction if self.most_fraction is None else self.most_fraction
        if not self.safety_fraction <= most <= 1.0:
            raise Misuse(f"most_fraction must be from safety_fraction to 1, got {most}")
        object.__setattr__(self, "usable_blocks", self._share(self.safety_fraction))
        object.__setattr__(self, "most_blocks", self._share(most))

    def _share(self, fraction: float) -> int:
        # The small term undoes binary rounding: 0.29 x 100 is 28.999999999999996 and means 29.
        blocks = min(self.total_blocks, math.floor(self.total_blocks * fraction + 1e-9))
        # Tokens in flight that the requests are not charged for one by one.
        return blocks if self.geometry is None else max(0, blocks - self.geometry.reserve_blocks)


@record
class CapRules:
    """Limits on the output cap that do not come from the client.

    `default` is enforced when the client sets none (None: the rest of the context);
    `ceiling` is the operator's upper limit (None: no limit).
    """

    default: int | None = None
    ceiling: int | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks, and what the operator allows them.

    `name`: a label, never a key or a secret. `weight`: share of the pool relative to the other
    tenants that want some. `ceiling`: most blocks held at once (None: no limit). `priority`: class;
    a higher one goes first, as far as the floors of the lower ones allow. `most_ceiling`: the ceiling
    once nothing is held back from the pool any more; what asks for more can never get in (None: as
    `ceiling`).
    """

    name: str = ""
    weight: float = 1.0
    ceiling: int | None = None
    priority: int = 0
    most_ceiling: int | None = None

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise Misuse(f"a tenant's weight must be above 0, got {self.weight}")
        if self.ceiling is not None and self.ceiling < 1:
            raise Misuse(f"a tenant's ceiling must be at least 1 block or None, got {self.ceiling}")
        if self.most_ceiling is not None and self.most_ceiling < (self.ceiling or self.most_ceiling + 1):
            raise Misuse(f"most_ceiling must be at least ceiling, got {self.most_ceiling}")

    @property
    def never_above(self) -> int | None:
        """Blocks that a request of this tenant can never have more of."""
        return self.ceiling if self.most_ceiling is None else self.most_ceiling


ANYONE = Tenant()
"""The one tenant of a gate whose operator tells none apart."""


@record
class Ask:
    """May this request go to the engine?

    `prompts`: exact token count of each prompt in the request (one, except for prompt lists).
    `output_cap`: most new tokens the client allows a sequence; None where it set none.
    `choices`: sequences generated for each prompt (`n`, `best_of`).
    `draw`: a number in [0, 1) from the caller, used to spread refused clients.
    `identity`: the same for the same request when it comes back, 0 where that is not known.
    `tries`: how often it was tried before, as far as the client says.
    """

    prompts: tuple[int, ...]
    output_cap: int | None = None
    choices: int = 1
    rules: CapRules = CapRules()
    max_wait: Seconds = 0.0
    draw: float = 0.0
    tenant: Tenant = ANYONE
    identity: int = 0
    tries: int = 0


@record
class Price:
    """What a request may reach at worst: blocks, sequences, and the cap that bounds them."""

    blocks: int
    sequences: int
    output_cap: int


@record
class Granted:
    """Admitted. The receiver owns the reservation `key` and must end it exactly once."""

    key: Key
    blocks: int
    sequences: int
    output_cap: int
    waited: Seconds = 0.0


@record
class Queued:
    """Waiting. The answer comes later from `Gate.ended` or `Gate.tick`, under the same key."""

    key: Key
    deadline: Seconds


@dataclass(frozen=True, slots=True)
class Refused:
    """Not admitted; nothing is held. Token figures are blocks x block size.

    `retry_after`: seconds until the slot forecast for this client; None where no retry can help.
    `output_cap`: the cap that was priced; `output_cap_that_fits`: the largest cap that would be
    admitted at this moment (None: no cap would). `is_least`: the prompt has at least so many tokens.
    """

    reason: Reason
    key: Key | None = None
    retry_after: Seconds | None = None
    prompt_tokens: int = 0
    needed_tokens: int = 0
    free_tokens: int = 0
    usable_tokens: int = 0
    context: int = 0
    output_cap: int | None = None
    output_cap_was_set: bool = False
    output_cap_that_fits: int | None = None
    detail: str = ""
    is_least: bool = False
