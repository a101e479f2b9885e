"""Pages of the engines that tell little: TGI, TensorRT-LLM, LMDeploy, Ollama, and any other.

TensorRT-LLM's /metrics is emptied by whoever reads it, so it is not among its paths.
"""

from __future__ import annotations

from kvgate.wire.engines.found import Level, Pages, Reading
from kvgate.wire.engines.pages import inside, models_in, names_of, object_of, samples, size, total

# TGI's largest block (flash decoding); its others, 64, 16 and 1, fit into it evenly.
TGI_LARGEST_BLOCK = 256
# Both back ends of LMDeploy, unless told otherwise.
LMDEPLOY_BLOCK = 64

TGI_PATHS = ("/info", "/metrics")
TENSORRT_LLM_PATHS = ("/v1/models", "/version")
LMDEPLOY_PATHS = ("/v1/models", "/metrics")
OLLAMA_PATHS = ("/api/version", "/api/ps", "/api/tags")
GENERIC_PATHS = ("/v1/models",)


def read_tgi(pages: Pages) -> Reading:
    """TGI's token budget is a gauge; the unit of its blocks is on no page."""
    found = Reading("tgi")
    info, metrics = object_of(pages, "/info"), pages.get("/metrics")
    model, version = info.get("model_id"), info.get("version")
    found.models = (model,) if isinstance(model, str) else ()
    found.version = version if isinstance(version, str) else None
    found.read("context", size(info.get("max_total_tokens")), "/info: max_total_tokens")
    found.read("max_seqs", size(info.get("max_concurrent_requests")), "/info: max_concurrent_requests")
    gauge = {size(line.value) for line in samples(metrics, "tgi_batch_max_total_tokens")} - {None}
    # Versions before 3 had it in /info; both may be there and differ.
    words = {word for word in (*gauge, size(info.get("max_batch_total_tokens"))) if word is not None}
    if found.context is None:
        found.why_unknown["context"] = "/info tells no max_total_tokens"
    if not words:
        found.why_unknown["total_blocks"] = "/metrics has no tgi_batch_max_total_tokens (before its warm-up?)"
        return found
    if len(words) > 1:
        found.warn(
            "capacity_contradicts",
            f"the budget is {' or '.join(f'{word:,}' for word in sorted(words))} tokens; the least is used",
            "give the right one with --total-blocks and --block-size",
            doubts=True,
        )
    # Block 0 is reserved; whatever the block is, one of the largest covers it.
    blocks = min(words) // TGI_LARGEST_BLOCK - 1
    if blocks < 1:
        found.why_unknown["total_blocks"] = f"a budget of {min(words)} tokens is less than two blocks of 256"
        return found
    found.read("block_size", TGI_LARGEST_BLOCK, "assumed: the largest of TGI's blocks")
    found.read("total_blocks", blocks, "/metrics: tgi_batch_max_total_tokens")
    found.note(
        "block_size_assumed",
        f"TGI's blocks have 1, 16, 64 or 256 tokens, by its attention; {TGI_LARGEST_BLOCK} is never too low, "
        "and wastes up to a block a request",
        "give its own with --block-size (flashinfer 1, flashdecoding 256, else 16) and --total-blocks",
    )
    found.running = total(samples(metrics, "tgi_batch_current_size"))
    found.waiting = total(samples(metrics, "tgi_queue_size"))
    return found


def read_tensorrt_llm(pages: Pages) -> Reading:
    """Names and a version. Its statistics would be drained by reading them."""
    found = Reading("tensorrt-llm")
    found.models = names_of(models_in(pages))
    version = object_of(pages, "/version").get("version")
    found.version = version if isinstance(version, str) else None
    why = "TensorRT-LLM tells it only where reading takes it away from others (/metrics)"
    found.why_unknown = {
        "total_blocks": f"{why}: its log, or LLM.get_kv_cache_capacity(), shows maxNumBlocks",
        "block_size": f"{why}: tokens_per_block of its KvCacheConfig, 32 unless set",
        "context": "no page tells it: what it was started with as --max_seq_len",
    }
    return found


def read_lmdeploy(pages: Pages) -> Reading:
    """LMDeploy shows shares of its cache, never its size."""
    found = Reading("lmdeploy")
    entries, metrics = models_in(pages), pages.get("/metrics")
    found.models = names_of(entries)
    found.read("block_size", LMDEPLOY_BLOCK, "the default of its back ends (--cache-block-seq-len)")
    found.running = total(samples(metrics, "lmdeploy:num_requests_running"))
    found.waiting = total(samples(metrics, "lmdeploy:num_requests_waiting"))
    found.why_unknown = {
        "total_blocks": "no page tells it: its log shows the number of cache blocks when it starts",
        "context": "no page tells it: what it was started with as --session-len",
    }
    return found


def read_ollama(pages: Pages) -> Reading:
    """Slots of a whole context each: a block is a slot."""
    found = Reading("ollama", whole_slots=True)
    version = object_of(pages, "/api/version").get("version")
    found.version = version if isinstance(version, str) else None
    loaded = object_of(pages, "/api/ps").get("models")
    entries = [m for m in loaded if isinstance(m, dict)] if isinstance(loaded, list) else []
    listed = object_of(pages, "/api/tags").get("models")
    names = [inside(m, "name") for m in (listed if isinstance(listed, list) else entries)]
    found.models = tuple(dict.fromkeys(name for name in names if isinstance(name, str)))
    contexts = {size(entry.get("context_length")) for entry in entries} - {None}
    known = {context for context in contexts if context is not None}
    if known:
        found.read("context", min(known), "/api/ps: context_length")
    else:
        found.why_unknown["context"] = "no model is loaded (/api/ps): send it one request, then look again"
    if len(entries) > 1:
        found.warn(
            "several_models",
            f"{len(entries)} models are loaded; each has slots of its own, and a request for another one "
            "loads it anew",
            "one kvgate upstream a model, or one model in Ollama (OLLAMA_MAX_LOADED_MODELS=1)",
            doubts=len(known) > 1,
        )
    found.read("max_seqs", 1, "Ollama's default: OLLAMA_NUM_PARALLEL is on no page")
    found.note(
        "slots_assumed",
        "OLLAMA_NUM_PARALLEL is on no page; one slot is assumed, its default",
        "give it with --max-seqs N",
        Level.WARNING,
    )
    return found


def read_generic(pages: Pages) -> Reading:
    """Nothing is known of it but the names of its models."""
    found = Reading("generic", groups="one")
    found.models = names_of(models_in(pages))
    why = "kvgate does not know this engine"
    found.why_unknown = dict.fromkeys(("total_blocks", "block_size", "context"), why)
    return found
