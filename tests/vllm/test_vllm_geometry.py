"""The price against vLLM's own planner and KV manager, step by step: `make test-vllm`.

Needs vLLM in an environment of its own, named by KVGATE_VLLM_PYTHON. Set KVGATE_MODEL_CONFIGS to a
folder of config.json files to run them as well. No weights, no server: seconds a model.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

from model_facts import FACTS

from kvgate.core.geometry import (
    Kind,
    KVLayout,
    Layer,
    ModelGeometry,
    Serving,
    UnknownGeometry,
    from_config,
    layout_for,
)
from kvgate.core.geometry.groups import _hybrid_block
from kvgate.core.geometry.pages import state_bytes
from kvgate.core.geometry.planned import planned_blocks

pytestmark = pytest.mark.vllm

SEED = 20261130
CASES = 12
CONTEXT = 40960
MEMORY = 64 << 30
ALONE = {"full_attention": "one group", "mla": "one group", "state": "states only"}


def configurations() -> dict[str, dict[str, Any]]:
    found = {fact.name: fact.config for fact in FACTS}
    folder = os.environ.get("KVGATE_MODEL_CONFIGS")
    for path in sorted(Path(folder).glob("*.json")) if folder else ():
        found[path.stem] = json.loads(path.read_text())
    return found


def family(kinds: set[Kind]) -> str:
    if len(kinds) == 1:
        return ALONE.get(next(iter(kinds)), "one sliding group")
    for kind, name in ((Kind.STATE, "state hybrid"), (Kind.CHUNKED, "chunked hybrid"), (Kind.CROSS, "cross")):
        if kind in kinds:
            return name
    return "sliding hybrid"


def shapes(draw: random.Random, largest: int) -> list[dict[str, Any]]:
    """Random prompts and caps, small ones and large ones, in random or in whole chunks."""
    cases = []
    for number in range(CASES):
        top = draw.choice([64, 1000, largest])
        cases.append(
            {
                "prompt": draw.randint(1, top),
                "cap": draw.randint(1, min(top, 3000)),
                "seed": draw.randrange(1 << 30),
                "whole_chunks": number % 2 == 0,
            }
        )
    return cases


@dataclass
class Job:
    """One model as the oracle runs it, and as kvgate lays it out both ways."""

    ask: dict[str, Any]
    geometry: ModelGeometry
    serving: Serving
    alone: KVLayout
    shared: KVLayout


def can_split(layer: Layer, tp: int) -> bool:
    """Whether vLLM would start: heads divide evenly. States are left whole, as the oracle has them."""
    return tp == 1 or (
        layer.kind is not Kind.STATE and (layer.kv_heads % tp == 0 or tp % layer.kv_heads == 0)
    )


def model_job(name: str, config: dict[str, Any], draw: random.Random) -> Job | None:
    """One model's job; None where kvgate refuses the model."""
    try:
        geometry = from_config(config)
        serving = Serving(
            block_size=draw.choice([16, 32]),
            kv_dtype=draw.choice(["auto", "fp8"])
            if not any(x.indexer_bytes for x in geometry.layers)
            else "auto",
            tp=draw.choice(
                [tp for tp in (1, 2, 4) if all(can_split(layer, tp) for layer in geometry.layers)]
            ),
            max_batched_tokens=draw.choice([512, 2048, 8192]),
            concurrent_batches=draw.choice([1, 2, 3]),
            prefix_caching=any(layer.kind is Kind.STATE for layer in geometry.layers) and draw.random() < 0.5,
            retention_interval=draw.choice([0, None]),
            encoder_tokens=1500 if any(layer.kind is Kind.CROSS for layer in geometry.layers) else None,
        )
        alone, shared = layout_for(geometry, serving), layout_for(geometry, serving, shared_transient=True)
    except UnknownGeometry:
        return None
    block, page = _hybrid_block(geometry.layers, serving)
    # The oracle has no packed caches: an index beside the latent is told as a wider latent.
    layers = [
        {
            "kind": str(layer.kind),
            "kv_heads": layer.kv_heads,
            "k_dim": layer.k_dim + layer.indexer_bytes // 2,
            "v_dim": layer.v_dim,
            "window": layer.window,
            "state_bytes": state_bytes(layer, serving.tp),
            "checkpoints": layer.state.checkpoints if layer.state else 0,
        }
        for layer in geometry.layers
    ]
    job = {
        "block_size": block,
        "state_page": page,
        "kv_dtype": serving.kv_dtype,
        "tp": serving.tp,
        "context": CONTEXT,
        "budget": serving.max_batched_tokens,
        "batches": serving.batches,
        "lookahead": 0,
        "drafts": 0,
        "mamba_mode": serving.states,
        "retention": serving.retention_interval,
        "encoder": serving.encoder_tokens or 0,
        "memory": MEMORY,
    }
    asked = {"name": name, "layers": layers, "job": job, "cases": shapes(draw, 30000)}
    return Job(asked, geometry, serving, alone, shared)


def ask_oracle(models: list[dict[str, Any]]) -> list[dict[str, Any]]:
    python = os.environ["KVGATE_VLLM_PYTHON"]
    script = Path(__file__).with_name("geometry_oracle.py")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [python, str(script)],
        input=json.dumps({"models": models}),
        capture_output=True,
        text=True,
        env=environment,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def test_the_price_is_never_below_what_vllm_allocates_and_close_above_it() -> None:
    draw = random.Random(SEED)
    made = [model_job(name, config, draw) for name, config in configurations().items()]
    # Many published files describe the same layers.
    jobs = list({(job.geometry.layers, str(job.ask["job"])): job for job in made if job is not None}.values())
    excess: dict[str, list[float]] = defaultdict(list)
    wrong = []
    for job, answer in zip(jobs, ask_oracle([job.ask for job in jobs]), strict=True):
        name, kinds = job.ask["name"], {layer.kind for layer in job.geometry.layers}
        groups = sorted([g.layers, 0 if g.kind is Kind.STATE else g.block_size] for g in job.alone.groups)
        if groups != answer["groups"] or MEMORY // job.alone.bytes_per_block != answer["num_blocks"]:
            wrong.append(f"{name}: groups {groups}, vLLM {answer['groups']}, {answer['num_blocks']} blocks")
        serving = job.serving
        planned = planned_blocks(job.alone.groups, serving, serving.in_flight, CONTEXT)
        if planned is not None and abs(planned - answer["longest"]) > 0.01:
            wrong.append(f"{name}: vLLM plans {answer['longest']} blocks for its longest, not {planned}")
        for case, (peak, final, settled) in zip(job.ask["cases"], answer["cases"], strict=True):
            shape = (case["prompt"], case["cap"], CONTEXT)
            price, shared = job.alone.price(*shape), job.shared.price(*shape)
            if price < peak or job.alone.blocks(*shape).final < final or shared < settled:
                wrong.append(
                    f"{name}: {case}: {price} and {shared} priced, vLLM's {peak}, {final} and {settled}"
                )
            excess[family(kinds)].append(price / peak - 1)
            if job.shared.rolling:
                # With the transient kept back once, a request pays for what it keeps while it decodes.
                excess[f"{family(kinds)}, shared transient"].append(shared / settled - 1)
    for name, values in sorted(excess.items()):
        middle, worst = statistics.median(values), max(values)
        print(f"{name}: {len(values)} requests, excess median {middle:.1%}, worst {worst:.1%} (seed {SEED})")
    assert wrong == []
    for name, values in excess.items():
        assert statistics.median(values) <= (0.02 if name.startswith("one group") else 0.05), name


def test_with_a_shared_transient_many_requests_never_pass_the_sum_of_prices_and_the_reserve() -> None:
    draw = random.Random(SEED + 1)
    jobs = []
    for fact in FACTS:
        job = model_job(fact.name, fact.config, draw)
        if job is None or not job.shared.reserve_blocks:
            continue
        sizes = [(draw.randint(1, 12000), draw.randint(1, 60)) for _ in range(10)]
        job.ask |= {"cases": [], "storms": [{"seed": draw.randrange(1 << 30), "shapes": sizes, "seqs": 10}]}
        jobs.append(job)
    for job, answer in zip(jobs, ask_oracle([job.ask for job in jobs]), strict=True):
        (storm,), (peak,) = job.ask["storms"], answer["storms"]
        prices = sum(job.shared.price(prompt, cap, CONTEXT) for prompt, cap in storm["shapes"])
        assert peak <= prices + job.shared.reserve_blocks, (job.ask["name"], storm["seed"])
        print(f"{job.ask['name']}: {peak} held, {prices} priced, {job.shared.reserve_blocks} kept back")
