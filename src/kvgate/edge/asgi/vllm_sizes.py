"""The pool behind vLLM's API server, out of the configuration in its own process.

Promises: vLLM's figures go through the reader that the gateway uses on vLLM's pages, so both fronts
price alike and neither guesses; a model with one KV group needs no geometry, whatever its cache type.
Nothing of vLLM is imported.
"""

from __future__ import annotations

import json
from typing import Any

from kvgate.core.geometry import Serving, UnknownGeometry, from_config
from kvgate.core.records import PoolFacts
from kvgate.wire.engines.finding import found_in
from kvgate.wire.engines.found import Finding, Found, Given, Level, Page, Pages
from kvgate.wire.engines.read_vllm import INFO


class UnknownPool(Exception):
    """What a request holds cannot be told. The message says why, and what to do."""


def pool_of(config: Any, safety_fraction: float) -> tuple[PoolFacts, list[Finding]]:
    """The pool of one rank, from a `VllmConfig`, and what the operator should know about it.

    With data parallelism one rank, because the rank of a request is not known before it is sent.
    Raises `UnknownPool`.
    """
    speculative = config.speculative_config
    drafts = getattr(speculative, "num_speculative_tokens", 0) or 0
    given = Given(max_seqs=config.scheduler_config.max_num_seqs, safety_fraction=safety_fraction)
    pages = _pages(config)
    # What a drafter keeps stands in the layout only.
    found = found_in("vllm", pages, given) if not drafts else None
    if found is None or "model_config" in found.missing:
        found = _with_geometry(config, pages, given, drafts)
    if found.facts is None:
        raise UnknownPool(
            f"kvgate cannot tell what a request of this model holds. {'; '.join(found.unknown)}. Start "
            "vLLM without --middleware kvgate.vllm.Middleware and put `kvgate serve` before it, which "
            "takes these options"
        )
    return found.facts, [finding for finding in found.warnings if finding.level is not Level.NOTE]


def _with_geometry(config: Any, pages: Pages, given: Given, drafts: int) -> Found:
    parallel, scheduler = config.parallel_config, config.scheduler_config
    try:
        serving = Serving(
            tp=parallel.tensor_parallel_size,
            pp=parallel.pipeline_parallel_size,
            dcp=parallel.decode_context_parallel_size,
            max_batched_tokens=scheduler.max_num_batched_tokens,
            draft_tokens=drafts,
            extra_lookahead=max(0, getattr(config, "num_lookahead_tokens", drafts + 1) - drafts),
            concurrent_batches=getattr(config, "max_concurrent_batches", None),
            hybrid_manager=not scheduler.disable_hybrid_kv_cache_manager,
        )
        model = config.model_config.hf_config.to_dict()
        from_config(model)
    except UnknownGeometry as error:
        return Found("vllm", missing=("model_config",), unknown=(str(error),))
    return found_in(
        "vllm",
        pages,
        Given(
            max_seqs=given.max_seqs,
            safety_fraction=given.safety_fraction,
            model_config=model,
            serving=serving,
        ),
    )


def _pages(config: Any) -> Pages:
    """What the server's own pages will say."""
    cache = config.cache_config
    ranks = max(1, config.parallel_config.data_parallel_size)
    lines = []
    for rank in range(ranks):
        labels = {name: str(value) for name, value in vars(cache).items()} | {"engine": str(rank)}
        shown = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
        lines.append(f"{INFO}{{{shown}}} 1")
    # One process: this one. Several API servers are told by its arguments.
    lines.append("process_start_time_seconds 1")
    models = {"data": [{"id": "model", "max_model_len": config.model_config.max_model_len}]}
    return {
        "/metrics": Page(200, "\n".join(lines)),
        "/v1/models": Page(200, json.dumps(models)),
        "/version": Page(0),
    }


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
