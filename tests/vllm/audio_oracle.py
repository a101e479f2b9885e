"""Audio tokens by vLLM's own models: reads lengths in samples, one a line, writes `model tokens` in JSON."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import vllm_command

# Before vLLM is imported.
importlib.metadata.version = vllm_command.version

EMBEDDING = {"audio_embd_layer": {"compression_rate": 8}}


def function_of(module: str, name: str) -> Any:
    """One function of a model whose module needs torchvision, which is not there."""
    import torch
    from vllm.model_executor.models import qwen2_audio

    path = Path(qwen2_audio.__file__).with_name(f"{module}.py")
    found = next(n for n in ast.parse(path.read_text()).body if getattr(n, "name", "") == name)
    names = {"torch": torch}
    exec(compile(ast.Module([found], []), str(path), "exec"), names)
    return names[name]


def main() -> None:
    import torch
    from vllm.model_executor.models import phi4mm, qwen2_audio

    qwen3 = function_of("qwen3_omni_moe_thinker", "_get_feat_extract_output_lengths")
    own = SimpleNamespace(get_hf_config=lambda: SimpleNamespace(embd_layer=EMBEDDING))
    phi4 = phi4mm.Phi4MMProcessingInfo
    for line in sys.stdin:
        samples = int(line)
        frames = torch.tensor([math.ceil(samples / 160)])
        made = {
            "qwen2_audio": int(qwen2_audio._get_feat_extract_output_lengths(frames)[1]),
            "qwen3_omni_moe": int(qwen3(frames)),
            "phi4mm": phi4._compute_audio_embed_size(own, phi4.get_audio_num_frames(own, samples, 16_000)),
        }
        print(json.dumps(made))


if __name__ == "__main__":
    main()
