"""vLLM's pages -> its pool.

Capacity: the labels of `vllm:cache_config_info` on /metrics. `num_gpu_blocks` is the sum over the
data-parallel engines, repeated on each engine's line, and holds one null block for each: a rank has
`num_gpu_blocks / engines - 1`. `kv_cache_size_tokens` is not capacity (it holds at the full context
only): it only tells whether the model has one KV group. Context: `max_model_len` of the base models
on /v1/models. What is not to be had: --max-num-seqs, the number of groups, caps out of
generation_config.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvgate.wire.engines.found import Pages, Reading
from kvgate.wire.engines.pages import inside, models_in, names_of, object_of, samples, size, total, whole

PATHS = ("/v1/models", "/version", "/metrics")
INFO = "vllm:cache_config_info"
_DRAFTS = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


def read(pages: Pages) -> Reading:
    """Everything that vLLM tells from outside."""
    found = Reading("vllm")
    version = object_of(pages, "/version").get("version")
    found.version = version if isinstance(version, str) else None
    _models(pages, found)
    _capacity(pages, found)
    _load(pages, found)
    return found


def _models(pages: Pages, found: Reading) -> None:
    entries = models_in(pages)
    found.models = names_of(entries)
    # An adapter's entry has a parent, and no length of its own.
    lengths = {size(entry.get("max_model_len")) for entry in entries if entry.get("parent") is None}
    known = {length for length in lengths if length is not None}
    if known:
        found.read("context", min(known), "/v1/models: max_model_len")
        found.engine_context = max(known)
    else:
        found.why_unknown["context"] = "/v1/models tells no max_model_len"
    if len(known) > 1:
        found.warn(
            "context_differs",
            f"/v1/models tells several lengths ({', '.join(map(str, sorted(known)))}); the shortest is used",
            "give the right one with --context",
            doubts=True,
        )


def _capacity(pages: Pages, found: Reading) -> None:
    lines = samples(pages.get("/metrics"), INFO)
    if not lines:
        why = "/metrics has no vllm:cache_config_info"
        found.why_unknown |= {"total_blocks": why, "block_size": why}
        found.groups = "unknown"
        return
    engines = {line.labels.get("engine", "0"): line.labels for line in lines}
    found.ranks = len(engines)
    # The smallest rank may have less than its part of the sum.
    found.needs_margin = found.ranks > 1
    sums = [size(labels.get("num_gpu_blocks")) for labels in engines.values()]
    sizes = {size(labels.get("block_size")) for labels in engines.values()}
    known = [blocks for blocks in sums if blocks is not None]
    source = f"/metrics: {INFO}"
    if len(known) == len(sums) and min(known) // found.ranks > 1:
        # Each rank's block 0 is its null block and never given to a request.
        found.read("total_blocks", min(known) // found.ranks - 1, f"{source}: num_gpu_blocks")
        found.is_exact = len(set(known)) == 1 and known[0] % found.ranks == 0
        if not found.is_exact:
            found.warn(
                "capacity_contradicts",
                f"num_gpu_blocks of {found.ranks} engines is {sorted(set(known))}: not one sum of equal "
                f"pools; {found.total_blocks} blocks a rank are used, the least that it can mean",
                "give the blocks of the smallest rank with --total-blocks",
                doubts=True,
            )
    else:
        found.why_unknown["total_blocks"] = f"num_gpu_blocks is {_shown(engines, 'num_gpu_blocks')}"
    if len(sizes) == 1 and None not in sizes:
        found.read("block_size", sizes.pop(), f"{source}: block_size")
    else:
        found.why_unknown["block_size"] = f"block_size is {_shown(engines, 'block_size')}"
        found.is_exact = False
    first = next(iter(engines.values()))
    found.prefix_caching = first.get("enable_prefix_caching", "True") != "False"
    mode = first.get("mamba_cache_mode", "none")
    # "none" is also what a model without states has, so it says no more than prefix caching does.
    found.state_mode = None if mode == "none" else mode
    found.match_unit = size(first.get("prefix_match_unit"))
    # Older engines, which do not show it, write no states within a prefill.
    found.retention_interval = whole(first.get("prefix_cache_retention_interval", "0"))
    if first.get("kv_offloading_size", "None") != "None":
        found.warn(
            "kv_offloading",
            "the engine moves its cache to other memory (--kv-offloading-size), and may keep blocks for some "
            "steps after the answer that they were for",
            "keep a margin (--safety-fraction 0.90 or less; auto does not rise here)",
        )
        found.needs_margin = True
    found.kv_dtype = first.get("cache_dtype", "auto")
    _groups(first, found)


def _groups(labels: Mapping[str, str], found: Reading) -> None:
    """One full-attention group, and nothing else, makes this many tokens out of the blocks."""
    tokens = size(labels.get("kv_cache_size_tokens"))
    if labels.get("is_attention_free") == "True":
        found.groups = "several"
        return
    if found.total_blocks is None or found.block_size is None or found.context is None or tokens is None:
        found.groups = "unknown"
        return
    blocks = found.total_blocks + 1
    longest = -(-found.context // found.block_size)
    found.groups = "one" if abs(blocks / longest * found.context - tokens) <= 1.5 else "several"
    try:
        concurrency = float(labels.get("kv_cache_max_concurrency", ""))
    except ValueError:
        return
    if concurrency > 0:
        found.blocks_of_longest = blocks / concurrency


def _load(pages: Pages, found: Reading) -> None:
    metrics = pages.get("/metrics")
    found.preemptions = total(samples(metrics, "vllm:num_preemptions_total"))
    found.running = total(samples(metrics, "vllm:num_requests_running"))
    found.waiting = total(samples(metrics, "vllm:num_requests_waiting"))
    positions = [size(line.labels.get("position", "")) or 0 for line in samples(metrics, _DRAFTS)]
    if positions:
        drafts = max(positions) + 1
        found.draft_tokens = drafts
        # Slots of the drafter (one more for some kinds), and the drafts of two steps in flight.
        found.lookahead = drafts + 1 + 2 * drafts
        found.sources["lookahead"] = "/metrics: positions of speculative tokens"
    # In one process the page also shows the process itself; several processes share theirs.
    if samples(metrics, INFO) and not samples(metrics, "process_start_time_seconds"):
        found.warn(
            "several_api_servers",
            "the metrics are collected from several API server processes",
            "behind kvgate that is safe; with kvgate's middleware inside vLLM each process would keep "
            "books of its own: start with --api-server-count 1",
        )


def _shown(engines: Mapping[str, Mapping[str, str]], name: str) -> str:
    values = sorted({inside(dict(labels), name) or "missing" for labels in engines.values()})
    return " and ".join(values)
