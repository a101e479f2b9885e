"""How an engine is started, as far as it changes the KV cache: vLLM's options under short names."""

from __future__ import annotations

from dataclasses import dataclass

from kvgate.core.geometry.layers import UnknownGeometry
from kvgate.core.geometry.pages import KV_DTYPES

# vLLM's max_num_batched_tokens on large GPUs; it takes 2,048 on small ones and 16,384 on the largest.
BUDGET = 8192
STATE_MODES = ("none", "align", "all")


@dataclass(frozen=True, slots=True)
class Serving:
    """The engine's options. Defaults are vLLM's.

    `block_size`: tokens a block, as the engine reports it (0.33 on CUDA: 16). `draft_tokens`:
    speculative tokens a step; `drafts_keep_kv`: the drafter stores KV (EAGLE, MTP, a draft model; not
    n-gram), `extra_lookahead`: slots beyond them (DFlash: 1); `model_drafter`: the model's own MTP
    layers do the drafting. `concurrent_batches`: steps in flight (2 with async scheduling; None:
    what vLLM takes, 2 without and `pp` with pipeline parallelism). `hybrid_manager`: off means that
    windows and chunks are kept whole. `state_mode`: vLLM's mamba_cache_mode, "none", "align" or "all"
    (None: what prefix caching makes of it); `match_unit`: its prefix_match_unit, tokens;
    `retention_interval`: its prefix_cache_retention_interval. `in_flight_tokens`: of all steps in flight
    together, where that is known and not the budget of one (None: budget x steps).
    """

    block_size: int = 16
    kv_dtype: str = "auto"
    tp: int = 1
    pp: int = 1
    dcp: int = 1
    max_batched_tokens: int | None = None
    in_flight_tokens: int | None = None
    concurrent_batches: int | None = None
    draft_tokens: int = 0
    drafts_keep_kv: bool = True
    extra_lookahead: int = 0
    model_drafter: bool = False
    hybrid_manager: bool = True
    prefix_caching: bool = True
    state_mode: str | None = None
    match_unit: int | None = None
    retention_interval: int | None = 0
    encoder_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("block_size", "tp", "pp", "dcp", "max_batched_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UnknownGeometry(f"{name} must be at least 1, got {value}")
        if self.draft_tokens < 0 or self.extra_lookahead < 0:
            raise UnknownGeometry("draft_tokens and extra_lookahead must not be negative")
        if self.states not in STATE_MODES:
            raise UnknownGeometry(
                f"mamba_cache_mode {self.states!r} is not known: use one of {', '.join(STATE_MODES)}"
            )
        if self.kv_dtype not in KV_DTYPES:
            raise UnknownGeometry(
                f"the KV cache type {self.kv_dtype!r} is not known: use one of {', '.join(KV_DTYPES)}"
            )

    @property
    def states(self) -> str:
        """Which states are kept: "none" but the last one, "align" those at block borders, "all"."""
        return self.state_mode or ("align" if self.prefix_caching else "none")

    @property
    def budget(self) -> int:
        """Tokens of one step at most."""
        return BUDGET if self.max_batched_tokens is None else self.max_batched_tokens

    @property
    def in_flight(self) -> int:
        """Tokens that may be scheduled and not settled."""
        return self.batches * self.budget if self.in_flight_tokens is None else self.in_flight_tokens

    @property
    def not_given_back(self) -> int:
        """Tokens whose blocks may not have come back: a request gives back what a step freed at its own next
        step, one step more than in flight. That one may be as large as all that are known to be."""
        return (
            (self.batches + 1) * self.budget if self.in_flight_tokens is None else 2 * self.in_flight_tokens
        )

    def copies(self, block_size: int) -> int:
        """Blocks more that a group beside states takes for a step, where a prefix may end within a block."""
        is_within = self.dcp > 1 if self.match_unit is None else self.match_unit < block_size
        return int(self.states == "align" and is_within)

    @property
    def batches(self) -> int:
        """Steps that may be in flight at once. Never too low: in doubt the larger number."""
        if self.concurrent_batches is not None:
            return max(1, self.concurrent_batches)
        return 2 if self.pp == 1 else self.pp + 1

    @property
    def lookahead(self) -> int:
        """Slots that the drafter writes beyond the tokens of the model itself."""
        return self.draft_tokens + self.extra_lookahead if self.draft_tokens and self.drafts_keep_kv else 0
