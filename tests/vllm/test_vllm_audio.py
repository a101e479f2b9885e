"""Recordings counted like vLLM's own models. `make test-vllm`.

No engine runs: the functions of its models are called in vLLM's interpreter.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvgate.tokens.audio import audio_rule
from kvgate.tokens.recordings import Clip

pytestmark = pytest.mark.vllm
SEED = 43
ORACLE = Path(__file__).with_name("audio_oracle.py")
WHISPER = {"sampling_rate": 16_000, "hop_length": 160, "chunk_length": 30}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_audio": {},
    "qwen3_omni_moe": {},
    "phi4mm": {"embd_layer": {"audio_embd_layer": {"compression_rate": 8}}},
}


def test_recordings_count_as_in_vllms_models() -> None:
    dice = random.Random(SEED)
    lengths = [480_000, 479_999, 1_600, *(dice.randrange(400, 480_000) for _ in range(500))]
    done = subprocess.run(
        [os.environ["KVGATE_VLLM_PYTHON"], str(ORACLE)],
        input="\n".join(map(str, lengths)),
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    truths = [json.loads(line) for line in done.stdout.splitlines()[-len(lengths) :]]
    for kind, config in CONFIGS.items():
        rule = audio_rule({"model_type": kind, **config}, WHISPER, {})
        assert rule is not None
        for samples, truth in zip(lengths, truths, strict=True):
            made = rule.tokens(Clip(samples, 16_000, True))
            assert made is not None
            assert made.tokens == truth[kind], (kind, samples)
