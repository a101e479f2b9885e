"""SGLang's pages -> its pool.

Capacity: `token_capacity` of each data-parallel rank in /server_info (older: `max_total_num_tokens`),
in pages of `page_size` tokens; nothing has to be taken off, the padding slot is outside. A
sliding-window model has a second, smaller pool; the smaller of the two is used, which is never too
much. Context: `context_length`, else `max_model_len` of /v1/models; never that of /tokenize, which is
the tokenizer's. The engine over-commits by design, so its usage is no measure of what is promised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvgate.wire.engines.found import Pages, Reading
from kvgate.wire.engines.pages import inside, models_in, names_of, object_of, samples, size, total

PATHS = ("/server_info", "/get_server_info", "/v1/models", "/v1/loads", "/metrics")


def read(pages: Pages) -> Reading:
    """Everything that SGLang tells from outside."""
    found = Reading("sglang")
    where = "/server_info" if object_of(pages, "/server_info") else "/get_server_info"
    info = object_of(pages, where)
    version = info.get("version")
    found.version = version if isinstance(version, str) else None
    found.models = names_of(models_in(pages))
    found.ranks = size(info.get("dp_size")) or 1
    ranks = _rank_states(info)
    loads = _loads(pages)
    _capacity(info, ranks, loads, where, found)
    _context(pages, info, where, found)
    _sequences(info, ranks, loads, where, found)
    _speculation(info, where, found)
    found.prefix_caching = info.get("disable_radix_cache") is not True
    metrics = pages.get("/metrics")
    found.preemptions = total(samples(metrics, "sglang:num_retracted_requests_total"))
    # Both gauges are shown by every rank; they add up.
    found.running = _sum(loads, "num_running_reqs", metrics and samples(metrics, "sglang:num_running_reqs"))
    found.waiting = _sum(loads, "num_waiting_reqs", metrics and samples(metrics, "sglang:num_queue_reqs"))
    return found


def _rank_states(info: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    states = info.get("internal_states")
    return [state for state in states if isinstance(state, dict)] if isinstance(states, list) else []


def _loads(pages: Pages) -> list[Mapping[str, Any]]:
    listed = object_of(pages, "/v1/loads").get("loads")
    return [load for load in listed if isinstance(load, dict)] if isinstance(listed, list) else []


def _capacity(
    info: Mapping[str, Any],
    ranks: list[Mapping[str, Any]],
    loads: list[Mapping[str, Any]],
    where: str,
    found: Reading,
) -> None:
    page = size(info.get("page_size"))
    found.read("block_size", page, f"{where}: page_size")
    if page is None:
        found.why_unknown["block_size"] = f"{where} tells no page_size"
    # Every word there is on one rank's tokens; they should be the same.
    capacities = [size(inside(state, "memory_usage", "token_capacity")) for state in ranks]
    words = [size(info.get("max_total_num_tokens")), *capacities]
    words += [size(load.get("max_total_num_tokens")) for load in loads]
    known = {word for word in words if word is not None}
    windows = {size(inside(state, "memory_usage", "token_capacity_swa")) for state in ranks} - {None}
    if not known or page is None:
        found.why_unknown.setdefault("total_blocks", f"{where} tells no token capacity")
        return
    tokens = min(known)
    found.is_exact = len(known) == 1
    if len(known) > 1:
        found.warn(
            "capacity_contradicts",
            f"the pages tell {', '.join(f'{word:,}' for word in sorted(known))} tokens a rank; the least is "
            "used",
            "ranks of one size, or the size of the smallest with --total-blocks",
            doubts=True,
        )
    smallest = min((window for window in windows if window is not None), default=None)
    if smallest is not None:
        found.is_exact = False
        found.note(
            "two_pools",
            f"the sliding-window layers have a pool of their own, of {smallest:,} tokens beside {tokens:,}; "
            "each request is charged its whole length on the smaller one: safe, and wasteful",
            "raise --swa-full-tokens-ratio in SGLang, or give the larger pool with --total-blocks where "
            "requests are much longer than the window",
        )
        tokens = min(tokens, smallest)
    if tokens // page:
        found.read("total_blocks", tokens // page, f"{where}: token capacity")


def _context(pages: Pages, info: Mapping[str, Any], where: str, found: Reading) -> None:
    told = size(info.get("context_length"))
    lengths = [size(entry.get("max_model_len")) for entry in models_in(pages)]
    listed = min((length for length in lengths if length is not None), default=None)
    if told is not None and listed is not None and told != listed:
        found.warn(
            "context_differs",
            f"{where} tells a context of {told:,} and /v1/models {listed:,}; the shorter is used",
            "give the right one with --context",
            doubts=True,
        )
    known = [length for length in (told, listed) if length is not None]
    if not known:
        found.why_unknown["context"] = f"neither {where} nor /v1/models tells it"
        return
    source = f"{where}: context_length" if told == min(known) else "/v1/models: max_model_len"
    found.read("context", min(known), source)


def _sequences(
    info: Mapping[str, Any],
    ranks: list[Mapping[str, Any]],
    loads: list[Mapping[str, Any]],
    where: str,
    found: Reading,
) -> None:
    words = [size(state.get("effective_max_running_requests_per_dp")) for state in ranks]
    words += [size(load.get("max_running_requests")) for load in loads]
    if not any(words):
        words = [size(info.get("max_running_requests"))]
    limits = [word for word in words if word is not None]
    found.read("max_seqs", min(limits, default=None), f"{where}: running requests a rank")


def _speculation(info: Mapping[str, Any], where: str, found: Reading) -> None:
    # The next step is prepared before the end of a request is seen: one token more.
    found.lookahead = 0 if info.get("disable_overlap_schedule") is True else 1
    if info.get("speculative_algorithm") in (None, "", "NONE"):
        return
    steps = size(info.get("speculative_num_steps")) or 1
    branches = size(info.get("speculative_eagle_topk")) or 1
    drafts = size(info.get("speculative_num_draft_tokens")) or 1
    found.lookahead += 2 * max(branches * steps, drafts)
    found.sources["lookahead"] = f"{where}: speculative options"


def _sum(loads: list[Mapping[str, Any]], name: str, lines: Any) -> int | None:
    counts = [load.get(name) for load in loads]
    known = [count for count in counts if isinstance(count, int) and not isinstance(count, bool)]
    if known and len(known) == len(counts):
        return sum(known)
    return total(lines or [])
