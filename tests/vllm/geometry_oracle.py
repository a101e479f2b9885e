"""What vLLM itself allocates: its planner and KV manager, run step by step. Runs in vLLM's Python.

Reads one JSON job from standard input, writes one JSON answer to standard output. The layers are
given; groups, page sizes, blocks and frees are vLLM's. No engine, no weights.
"""

from __future__ import annotations

import json
import math
import random
import sys
from types import SimpleNamespace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    get_max_concurrency_for_kv_cache_config,
)
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import Request

GIB = 1 << 30
DTYPES = {"auto": torch.bfloat16, "fp8": torch.uint8}


def spec_for(layer: dict[str, Any], job: dict[str, Any]) -> KVCacheSpec:
    kind, block, dtype = layer["kind"], job["block_size"], DTYPES[job["kv_dtype"]]
    if kind == "state":
        return MambaSpec(
            # Without prefix caching vLLM keeps one state however long the sequence is.
            block_size=block if job["mamba_mode"] == "align" else job["context"],
            shapes=((layer["state_bytes"],),),
            dtypes=(torch.uint8,),
            page_size_padded=job["state_page"] or None,
            mamba_cache_mode=job["mamba_mode"],
            num_speculative_blocks=job["drafts"],
            num_prefill_checkpoint_blocks=layer["checkpoints"],
            prefill_checkpoint_alignment=1 if layer["checkpoints"] else None,
        )
    heads = max(1, layer["kv_heads"] // job["tp"])
    shape = {"block_size": block, "num_kv_heads": heads, "head_size": layer["k_dim"], "dtype": dtype}
    if kind == "mla":
        return MLAAttentionSpec(**shape)
    shape["head_size_v"] = layer["v_dim"]
    if kind == "sliding_attention":
        return SlidingWindowSpec(sliding_window=layer["window"], **shape)
    if kind == "chunked_attention":
        return ChunkedLocalAttentionSpec(attention_chunk_size=layer["window"], **shape)
    return CrossAttentionSpec(**shape) if kind == "cross_attention" else FullAttentionSpec(**shape)


def config_for(job: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=job["context"],
            original_max_model_len=job["context"],
            hf_config=SimpleNamespace(),
            hf_text_config=SimpleNamespace(),
        ),
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=None,
            mamba_cache_mode=job["mamba_mode"],
            enable_prefix_caching=False,
            prefix_cache_retention_interval=job["retention"],
            block_size=job["block_size"],
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            tensor_parallel_size=job["tp"],
            pipeline_parallel_size=1,
        ),
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=False, max_num_encoder_input_tokens=job["encoder"]
        ),
        speculative_config=None,
        num_prefill_lookahead_tokens=0,
        max_in_flight_tokens=job["batches"] * job["budget"],
        attention_config=SimpleNamespace(hisparse_config=None),
        kv_transfer_config=None,
        additional_config=None,
    )


class Sequence:
    """One request that the manager serves: chunks while it prefills, then a token a step."""

    def __init__(self, manager: KVCacheManager, name: str, prompt: int, cap: int) -> None:
        self.manager, self.prompt, self.cap = manager, prompt, cap
        self.request = Request(
            request_id=name,
            prompt_token_ids=[1] * prompt,
            sampling_params=SamplingParams(max_tokens=cap),
            pooling_params=None,
        )
        self.computed = 0
        self.flying: list[int] = []  # tokens of the steps in flight

    @property
    def end(self) -> int:
        return self.prompt + self.cap - 1

    def step(self, tokens: int, batches: int, lookahead: int, encoder: int = 0) -> int:
        """One scheduled step; returns the blocks held after it."""
        while len(self.flying) >= batches:
            self.flying.pop(0)
        self.request.num_computed_tokens = self.computed
        self.request.num_in_flight_tokens = sum(self.flying)
        blocks = self.manager.allocate_slots(
            self.request,
            tokens,
            num_lookahead_tokens=lookahead,
            num_encoder_tokens=encoder if self.computed == 0 else 0,
        )
        if blocks is None:
            raise MemoryError("the pool of the test is too small")
        self.computed += tokens
        self.flying.append(tokens)
        return held(self.manager)


def is_state(group: Any) -> bool:
    """State groups have no tokens to a block."""
    spec = group.kv_cache_spec
    return isinstance(getattr(spec, "first_spec", spec), MambaSpec)


def held(manager: KVCacheManager) -> int:
    """Blocks in use: all but the free ones and the null block."""
    pool = manager.block_pool
    return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


def peak_of(manager: KVCacheManager, job: dict[str, Any], case: dict[str, Any], name: str) -> tuple[int, ...]:
    """Blocks of one request alone, with its chunks drawn by the case's seed: the peak, the final ones, and
    the peak of the steps in which no part of the prompt was in flight any more."""
    draw = random.Random(case["seed"])
    one = Sequence(manager, name, case["prompt"], case["cap"])
    batches, lookahead, encoder = job["batches"], job["lookahead"], job["encoder"]
    peak = final = settled = 0
    while one.computed < case["prompt"]:
        rest = case["prompt"] - one.computed
        most = min(rest, job["budget"])
        tokens = most if case["whole_chunks"] else draw.randint(1, most)
        if case["whole_chunks"] and job["mamba_mode"] == "align" and most < rest:
            # As the scheduler does beside states: chunks end at the borders of blocks, or run up to one.
            block = job["block_size"]
            to_border = block - one.computed % block
            tokens = most // block * block if to_border == block and most >= block else min(most, to_border)
        final = one.step(tokens, batches, lookahead, encoder)
        peak = max(peak, final)
    while one.computed < one.end:
        one.request.append_output_token_ids(1)
        final = one.step(1, batches, lookahead)
        peak = max(peak, final)
        settled = max(settled, final) if max(one.flying) == 1 else settled
    manager.free(one.request)
    return peak, final, max(settled, final)


def storm(manager: KVCacheManager, job: dict[str, Any], storm: dict[str, Any]) -> int:
    """Most blocks held together by requests that a scheduler with one token budget serves."""
    draw = random.Random(storm["seed"])
    waiting = [Sequence(manager, f"s{i}", *shape) for i, shape in enumerate(storm["shapes"])]
    running: list[Sequence] = []
    peak = 0
    while waiting or running:
        budget = draw.choice([job["budget"], draw.randint(1, job["budget"])])
        while waiting and len(running) < storm["seqs"]:
            running.append(waiting.pop(0))
        budget = max(budget, len(running))
        for one in running:
            if budget <= 0:
                break
            prefill = one.prompt - one.computed
            if prefill > 0:
                tokens = min(prefill, budget)
            else:
                one.request.append_output_token_ids(1)
                tokens = 1
            one.step(tokens, job["batches"], job["lookahead"])
            budget -= tokens
            peak = max(peak, held(manager))
        for one in [one for one in running if one.computed >= one.end]:
            manager.free(one.request)
            running.remove(one)
    return peak


def main() -> None:
    job = json.load(sys.stdin)
    register_all_kvcache_specs(SimpleNamespace())
    answers = []
    for model in job["models"]:
        settings = model["job"]
        config = config_for(settings)
        specs = {f"layer.{i}": spec_for(layer, settings) for i, layer in enumerate(model["layers"])}
        planned = get_kv_cache_configs(config, [specs], [settings["memory"]])
        pool = generate_scheduler_kv_cache_config(planned)
        sizes = [group.kv_cache_spec.block_size for group in pool.kv_cache_groups]
        manager = KVCacheManager(
            pool,
            max_model_len=settings["context"],
            scheduler_block_size=math.lcm(*sizes),
            hash_block_size=math.gcd(*sizes),
            max_in_flight_tokens=settings["batches"] * settings["budget"],
            enable_caching=False,
        )
        answers.append(
            {
                "groups": sorted(
                    [len(group.layer_names), 0 if is_state(group) else group.kv_cache_spec.block_size]
                    for group in pool.kv_cache_groups
                ),
                "bytes_per_block": settings["memory"] // pool.num_blocks,
                "num_blocks": pool.num_blocks,
                "longest": pool.num_blocks / get_max_concurrency_for_kv_cache_config(config, pool),
                "cases": [peak_of(manager, settings, case, f"r{i}") for i, case in enumerate(model["cases"])],
                "storms": [storm(manager, settings, one) for one in model.get("storms", [])],
            }
        )
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
