"""Directories without a tokenizer.json: Mistral's real files, and small models trained in the test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mistral_common
import sentencepiece
from traffic import TEXTS

from kvgate.tokens.corpus import check_texts

DATA = Path(mistral_common.__file__).parent / "data"
LLAMA = DATA / "tokenizer.model.v1"
TEKKEN = DATA / "tekken_240718.json"
# The file in the library, and its name on a model's page.
NATIVE = {
    "tekken": (TEKKEN, "tekken.json"),
    "v1": (LLAMA, "tokenizer.model.v1"),
    "v2": (DATA / "mistral_instruct_tokenizer_240216.model.v2", "tokenizer.model.v2"),
    "v3": (DATA / "mistral_instruct_tokenizer_240323.model.v3", "tokenizer.model.v3"),
    "v7": (DATA / "mistral_instruct_tokenizer_241114.model.v7", "tokenizer.model.v7"),
}
SPELLED = ["[INST]", "<s>", "</s>", "[TOOL_CALLS]", " <s>", "<s> ", "x </s>\n", "[NEW]", "<tool>", "<ctl>"]


def texts(seed: int, how_many: int = 150) -> list[str]:
    """Adversarial texts with names of special tokens in them, and every kind of traffic."""
    return [*check_texts(seed, how_many, SPELLED), *TEXTS.values(), *(text * 5 for text in TEXTS.values())]


def directory(
    folder: Path,
    source: Path,
    name: str = "tokenizer.model",
    config: dict[str, Any] | None = None,
    model_type: str | None = None,
) -> Path:
    """`folder` becomes a model's directory with `source` under that name."""
    (folder / name).symlink_to(source)
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def trained(folder: Path, kind: str, rules: str) -> Path:
    """A small model of our own. `kind`: bpe or unigram; `rules`: how it normalizes."""
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join([*TEXTS.values(), "the quick brown fox says hello world"] * 5))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / kind),
        vocab_size=500,
        model_type=kind,
        byte_fallback=True,
        normalization_rule_name=rules,
        remove_extra_whitespaces=rules != "identity",
        user_defined_symbols=["<tool>", "\n\n"],
        control_symbols=["<ctl>"],
        hard_vocab_limit=False,
        minloglevel=3,
        max_sentence_length=100_000,
    )
    return folder / f"{kind}.model"
