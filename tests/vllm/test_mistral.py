"""Mistral's own files and SentencePiece models, counted like vLLM's own code. `make test-vllm`.

No engine runs: the code that vLLM's front end calls is run in vLLM's interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "tokens"))
from converted import LLAMA, NATIVE, directory, texts
from mistral_chats import CHATS, bodies

from kvgate.tokens import CannotCount, load

pytestmark = pytest.mark.vllm
SEED = 41
ORACLE = Path(__file__).with_name("mistral_oracle.py")


def by_vllm(folder: Path, mode: str, wanted: list[dict[str, Any]]) -> list[str]:
    done = subprocess.run(
        [os.environ["KVGATE_VLLM_PYTHON"], str(ORACLE), str(folder), mode],
        input="\n".join(json.dumps(body) for body in wanted),
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()[-len(wanted) :]


@pytest.mark.parametrize("version", NATIVE)
def test_chats_and_texts_count_as_in_the_mistral_mode(version: str, tmp_path: Path) -> None:
    folder = directory(tmp_path, *NATIVE[version])
    counter = load(folder)
    chats = [{"model": "m", **body} for body in [*CHATS, *bodies(60)]]
    prompts = [{"prompt": text} for text in texts(SEED)]
    counted = 0
    for body, truth in zip([*chats, *prompts], by_vllm(folder, "mistral", [*chats, *prompts]), strict=True):
        try:
            count = counter.count_text(body["prompt"]) if "prompt" in body else counter.count_chat(body)
        except CannotCount:
            assert truth == "-", body
            continue
        assert str(count.prompt_tokens) == truth, body
        counted += 1
    assert counted > len(prompts) + 50


@pytest.mark.parametrize("legacy", [True, False])
def test_a_sentencepiece_model_of_llamas_class_counts_as_in_the_hf_mode(legacy: bool, tmp_path: Path) -> None:
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    folder = directory(
        tmp_path,
        LLAMA,
        config={**names, "tokenizer_class": "LlamaTokenizer", "legacy": legacy},
        model_type="llama",
    )
    counter = load(folder)
    prompts = [{"prompt": text} for text in texts(SEED)]
    for body, truth in zip(prompts, by_vllm(folder, "hf", prompts), strict=True):
        assert str(counter.count_text(body["prompt"]).prompt_tokens) == truth, body
