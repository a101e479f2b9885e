"""One look at an engine's live figures: blocks in use, and preemptions so far.

Promise: total and modest. A figure that is missing or impossible is None; it is a check on kvgate's
own books and never their source. Blocks of cached prefixes that nobody uses count as free, as the
engines themselves count them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvgate.core.records import PoolFacts
from kvgate.wire.engines.found import Pages
from kvgate.wire.engines.pages import Sample, inside, json_of, samples, total, whole

# TensorRT-LLM is not here: looking would take its figures from whoever else reads them.
LOOKS: dict[str, str] = {
    "vllm": "/metrics",
    "sglang": "/metrics",
    "llamacpp": "/slots",
    "tgi": "/metrics",
    "lmdeploy": "/metrics",
}


@dataclass(frozen=True, slots=True)
class Sight:
    """`used_blocks`: held by running requests; `preemptions`: a counter since the engine started;
    `running`: sequences; `each`: what each of them holds, and, where its cap is told, may come to hold.
    None: not told."""

    used_blocks: int | None = None
    preemptions: int | None = None
    running: int | None = None
    each: tuple[int, ...] | None = None

    @property
    def is_blind(self) -> bool:
        return self.used_blocks is None and self.preemptions is None and self.running is None


def sight_in(engine: str, pages: Pages, facts: PoolFacts, rank: str | None = None) -> Sight:
    """What `engine` shows of the pool `facts`. `rank`: its label where it is one of several."""
    path = LOOKS.get(engine)
    page = pages.get(path) if path is not None else None
    if page is None or not page.is_ok:
        return Sight()
    if engine == "llamacpp":
        return _llamacpp(json_of(page))

    def of(*names: str) -> list[Sample]:
        return [s for s in samples(page, *names) if rank is None or rank in (*_ranks(s),)]

    if engine == "vllm":
        share = _most(of("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"))
        return Sight(
            _blocks(share, facts),
            total(of("vllm:num_preemptions_total")),
            total(of("vllm:num_requests_running")),
        )
    if engine == "sglang":
        tokens = max((whole(s.value) or 0 for s in of("sglang:num_used_tokens")), default=None)
        used = None if tokens is None else -(-tokens // facts.block_size)
        return Sight(
            used, total(of("sglang:num_retracted_requests_total")), total(of("sglang:num_running_reqs"))
        )
    if engine == "tgi":
        budget = total(of("tgi_batch_current_max_tokens"))
        used = None if budget is None else -(-budget // facts.block_size)
        return Sight(used, None, total(of("tgi_batch_current_size")))
    share = _most(of("lmdeploy:gpu_cache_usage_perc"))
    return Sight(_blocks(share, facts), None, total(of("lmdeploy:num_requests_running")))


def _ranks(sample: Sample) -> Iterable[str]:
    return (value for key, value in sample.labels.items() if key in ("engine", "dp_rank"))


def _most(found: Iterable[Sample]) -> float | None:
    """The fullest of several pools; None where one of them makes no sense."""
    shares = [sample.value for sample in found]
    if not shares or not all(math.isfinite(share) and 0 <= share <= 1.0001 for share in shares):
        return None
    return max(shares)


def _blocks(share: float | None, facts: PoolFacts) -> int | None:
    # The share is of the blocks without the null block, as `total_blocks` is.
    return None if share is None else round(share * facts.total_blocks)


def _llamacpp(slots: object) -> Sight:
    if not isinstance(slots, list):
        return Sight()
    busy = [slot for slot in slots if isinstance(slot, dict) and slot.get("is_processing") is True]
    # It grows with the answer, whatever its name says.
    cells = [whole(slot.get("n_prompt_tokens")) for slot in busy]
    known = [cell for cell in cells if cell is not None]
    # What idle slots still hold is given up as soon as it is needed.
    if len(known) < len(busy):
        return Sight(None, None, len(busy))
    # -1 is no cap: then it is taken for what it holds.
    left = [whole(inside(slot, "next_token", 0, "n_remain")) or 0 for slot in busy]
    return Sight(sum(known), None, len(busy), tuple(map(sum, zip(known, left, strict=True))))
