"""Write a tiny random-weight model that vLLM can serve: `python make_model.py FOLDER [--kind sliding ...]`.

Runs in vLLM's own environment, for its `tokenizers` package. The weights are made up by vLLM
(`--load-format dummy`); the tokenizer is real, one token a byte. Kinds: `dense`; and `sliding` (Gemma
3) and `linear` (Qwen3-Next), whose every third layer attends to everything.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTEXT = 4096
HEAD = 64
WINDOW = 512
PERIOD = 3
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}<|assistant|>"


def config_of(kind: str, hidden: int = 128, layers: int | None = None) -> dict[str, Any]:
    """The configuration of a model of `hidden` width; `layers`: 2, or 6 of a hybrid, unless given."""
    layers = layers or (2 if kind == "dense" else 2 * PERIOD)
    if hidden % HEAD or (kind != "dense" and layers % PERIOD):
        raise ValueError(f"the width is a multiple of {HEAD}, the layers of a hybrid one of {PERIOD}")
    heads = hidden // HEAD
    shared = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": min(2, heads),
        "head_dim": HEAD,
        "vocab_size": 320,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        "eos_token_id": 256,
    }
    return shared | KINDS[kind](hidden, layers)


def _dense(hidden: int, layers: int) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def _sliding(hidden: int, layers: int) -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "layer_types": _pattern("sliding_attention", "full_attention", layers),
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": HEAD,
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _linear(hidden: int, layers: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "full_attention_interval": PERIOD,
        "linear_num_key_heads": hidden // HEAD,
        "linear_num_value_heads": hidden // HEAD,
        "linear_key_head_dim": HEAD,
        "linear_value_head_dim": HEAD,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": hidden,
        "shared_expert_intermediate_size": hidden,
        "partial_rotary_factor": 0.25,
    }


def _pattern(local: str, whole: str, layers: int) -> list[str]:
    return [whole if i % PERIOD == PERIOD - 1 else local for i in range(layers)]


KINDS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "dense": _dense,
    "sliding": _sliding,
    "linear": _linear,
}


def write(folder: Path, config: dict[str, Any]) -> None:
    """The configuration, and a tokenizer with a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["</s>", "<|user|>", "<|assistant|>", "<|system|>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "model_max_length": CONTEXT,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=sorted(KINDS), default="dense")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int)
    given = parser.parse_args()
    write(given.folder, config_of(given.kind, given.hidden, given.layers))


if __name__ == "__main__":
    main()
