"""A small tokenizer of our own: byte-level BPE with ChatML's special tokens, trained in the test."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIALS = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<|image|>"]
CHATML = (
    "{{ bos_token }}{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}"
    "{% endfor %}<|im_end|>\n{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}{% if message.tool_calls %}{% for call in message.tool_calls %}"
    "<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = "the quick brown fox jumps over the lazy dog and says hello world to you 123 def return"


def write_model(folder: Path, template: str | None = CHATML, config: dict[str, object] | None = None) -> Path:
    """`folder` becomes a model's directory."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    tokenizer.add_tokens(
        [AddedToken("<tool_call>", normalized=False), AddedToken("</tool_call>", normalized=False)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {"bos_token": "<|bos|>", "eos_token": {"content": "<|im_end|>"}}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | (config or {})))
    return folder
