"""Answers of engines in their recorded shapes: vLLM's and llama.cpp's from running ones, the others
written from their sources and documents. Only what kvgate reads, and what could mislead it."""

from __future__ import annotations

import json
from typing import Any

from kvgate.wire.engines.found import Page


def pages(texts: dict[str, Any]) -> dict[str, Page]:
    """Each text, or value written as JSON, as an answer with status 200; a Page is taken as it is."""
    made = {}
    for path, text in texts.items():
        whole = text if isinstance(text, str) else None if isinstance(text, Page) else json.dumps(text)
        made[path] = text if isinstance(text, Page) else Page(200, whole or "")
    return made


def model_list(owner: str, *names: str, **fields: Any) -> dict[str, Any]:
    entries = [{"id": name, "object": "model", "owned_by": owner} | fields for name in names]
    return {"object": "list", "data": entries}


VLLM_LABELS = {
    "block_size": "128",
    "cache_dtype": "auto",
    "effective_attention_block_size": "128",
    "enable_prefix_caching": "True",
    "gpu_memory_utilization": "0.92",
    "is_attention_free": "False",
    "kv_cache_max_concurrency": "2.0",
    "kv_cache_size_tokens": "8192",
    "mamba_block_size": "None",
    "num_cpu_blocks": "None",
    "num_gpu_blocks": "64",
    "num_gpu_blocks_override": "64",
    "sliding_window": "None",
}


def vllm_metrics(*engines: dict[str, str], more: str = "", one_process: bool = True) -> str:
    """The page of a vLLM with these engines' labels, over those of a running one."""
    lines = ["# TYPE vllm:cache_config_info gauge"]
    for index, labels in enumerate(engines or ({},)):
        shown = {"engine": str(index)} | VLLM_LABELS | labels
        written = ",".join(f'{name}="{value}"' for name, value in shown.items())
        lines.append(f"vllm:cache_config_info{{{written}}} 1.0")
        name = f'{{engine="{index}",model_name="tiny"}}'
        lines += [
            f"vllm:num_requests_running{name} 0.0",
            f"vllm:num_requests_waiting{name} 0.0",
            f"vllm:kv_cache_usage_perc{name} 0.25",
            f"vllm:num_preemptions_total{name} 0.0",
            f"vllm:num_preemptions_created{name} 1.796029064220529e+09",
        ]
    if one_process:
        lines.append("process_start_time_seconds 1.79602904408e+09")
    return "\n".join([*lines, more, ""])


def vllm(*engines: dict[str, str], context: Any = 4096, **more: Any) -> dict[str, Page]:
    models = model_list("vllm", "tiny", max_model_len=context, parent=None)
    return pages(
        {"/v1/models": models, "/version": {"version": "0.33.0"}, "/metrics": vllm_metrics(*engines, **more)}
    )


def sglang(**fields: Any) -> dict[str, Page]:
    """Two data-parallel ranks, pages of 64."""
    rank = {
        "effective_max_running_requests_per_dp": 256,
        "memory_usage": {"token_capacity": 65_536, "weight": 15.0, "kvcache": 8.0},
    }
    info = {
        "model_path": "m",
        "dp_size": 2,
        "tp_size": 1,
        "page_size": 64,
        "context_length": 32_768,
        "max_total_num_tokens": 65_536,
        "max_req_input_len": 32_762,
        "max_running_requests": None,
        "speculative_algorithm": None,
        "disable_radix_cache": False,
        "internal_states": [rank, rank],
        "version": "0.5.23",
    } | fields
    metrics = "\n".join(
        f'sglang:{name}{{dp_rank="{r}",pid="{r}"}} {value}'
        for r in (0, 1)
        for name, value in (("num_running_reqs", 2.0), ("num_queue_reqs", 1.0), ("num_used_tokens", 6400.0))
    )
    counter = (
        'sglang:num_retracted_requests_total{dp_rank="0"} 3.0\nsglang:num_retracted_reqs{dp_rank="0"} 1.0'
    )
    return pages(
        {
            "/server_info": info,
            "/v1/models": model_list("sglang", "m", max_model_len=32_768),
            "/metrics": f"{metrics}\n{counter}\n",
        }
    )


def llamacpp(n_ctx: Any = 2048, slots: int = 4, **fields: Any) -> dict[str, Page]:
    props = {
        "default_generation_settings": {"params": {"n_predict": -1}, "n_ctx": n_ctx},
        "total_slots": slots,
        "model_alias": "tiny",
        "build_info": "b1-0c1e570",
    } | fields
    shown = [{"id": i, "n_ctx": n_ctx, "speculative": False, "is_processing": False} for i in range(slots)]
    models = model_list("llamacpp", "tiny", aliases=["tiny"], meta={"n_ctx": n_ctx, "n_ctx_train": 8192})
    return pages({"/props": props, "/slots": shown, "/v1/models": models})


def tgi(budget: str = "tgi_batch_max_total_tokens 65536", **fields: Any) -> dict[str, Page]:
    info = {
        "model_id": "meta-llama/Llama-3.1-8B",
        "max_concurrent_requests": 128,
        "max_input_tokens": 4095,
        "max_total_tokens": 4096,
        "max_client_batch_size": 4,
        "router": "text-generation-router",
        "version": "3.3.6",
    } | fields
    return pages({"/info": info, "/metrics": f"{budget}\ntgi_batch_current_size 3\ntgi_queue_size 2\n"})


def ollama(*contexts: Any) -> dict[str, Page]:
    loaded = [
        {"name": f"m{i}", "context_length": length, "size_vram": 1} for i, length in enumerate(contexts)
    ]
    return pages(
        {
            "/api/version": {"version": "0.12.0"},
            "/api/ps": {"models": loaded},
            "/api/tags": {"models": [{"name": "m0"}, {"name": "m1"}]},
        }
    )
