"""A random-weight llama model of half a megabyte that the real llama.cpp loads in about a second.

Promises: the same bytes on every machine (fixed seed); a byte-level vocabulary, so that every text
can be tokenized; a ChatML template; answers of printable ASCII that do not end by themselves. It
says nothing sensible: it is there so that tests meet the real engine's cache, not a model of it.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

SEED = 20251130
LAYERS = 2
WIDTH = 64
FEED_FORWARD = 128
HEADS = 4
CONTEXT = 8192
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Pairs that byte-pair encoding joins, so that one token is not always one byte.
# fmt: off
PAIRS = (
    "th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "ti", "es", "or", "te",
    "of", "ed", "is", "it", "al", "ar", "st", "to", "nt", "ng", "se", "ha", "as", "ou",
    "io", "le", "ve", "co", "me", "de", "hi", "ri", "ro", "ic", "ne", "ea",
)
# fmt: on
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_tiny_gguf(path: Path) -> Path:
    """Write the model to `path` and return it."""
    tokens = _byte_characters() + list(PAIRS) + list(SPECIAL)
    merges = [f"{pair[0]} {pair[1]}" for pair in PAIRS]
    types = [gguf.TokenType.NORMAL] * (len(tokens) - len(SPECIAL)) + [gguf.TokenType.CONTROL] * len(SPECIAL)

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("kvgate tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, tensor in _tensors(tokens).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _byte_characters() -> list[str]:
    """One character for each of the 256 bytes, in GPT-2's alphabet: bytes that do not print are
    moved, in order, to the code points from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(moved)) for byte in range(256)]


def _tensors(tokens: list[str]) -> dict[str, NDArray[np.float32]]:
    dice = np.random.default_rng(SEED)

    def random(*shape: int) -> NDArray[np.float32]:
        return (dice.standard_normal(shape) * 0.1).astype(np.float32)

    embedding = random(len(tokens), WIDTH)
    output = random(len(tokens), WIDTH) * 3
    # Every token carries the same large first coordinate, which the small layers cannot turn; the
    # output layer reads it as "printable ASCII only". So no answer ends early, and none contains
    # half a character, which the server would hold back.
    embedding[:, 0] = 4.0
    wanted = np.array([token.isascii() and token not in SPECIAL for token in tokens])
    output[:, 0] = np.where(wanted, 5.0, -5.0)

    tensors = {"token_embd.weight": embedding}
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        tensors[block + "attn_norm.weight"] = np.ones(WIDTH, dtype=np.float32)
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensors[f"{block}{part}.weight"] = random(WIDTH, WIDTH)
        tensors[block + "ffn_norm.weight"] = np.ones(WIDTH, dtype=np.float32)
        tensors[block + "ffn_gate.weight"] = random(FEED_FORWARD, WIDTH)
        tensors[block + "ffn_up.weight"] = random(FEED_FORWARD, WIDTH)
        tensors[block + "ffn_down.weight"] = random(WIDTH, FEED_FORWARD)
    tensors["output_norm.weight"] = np.ones(WIDTH, dtype=np.float32)
    tensors["output.weight"] = output
    return tensors
