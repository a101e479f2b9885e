"""Mistral's `tekken.json` as `tokenizers`: byte-level BPE whose ranks are the order of merging.

Promises: a text's tokens as mistral-common counts them. Its special tokens are never read out of a
text: they are put there by the code that writes a chat, so a user who spells one out gets its letters.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, pre_tokenizers, processors
from tokenizers.models import BPE

from kvgate.tokens.records import BadTokenizer

BOS = "<s>"
_BYTES = 256


def read_tekken(path: Path) -> tuple[Tokenizer, list[str]]:
    """The tokenizer in the file at `path`, and its special tokens' names; old files name none.

    Raises `BadTokenizer`.
    """
    try:
        data = json.loads(path.read_bytes())
        config = data["config"]
        size = config["default_vocab_size"] - config["default_num_special_tokens"]
        ranks = _ranks(data["vocab"], size)
        specials = [str(token["token_str"]) for token in data.get("special_tokens") or ()]
        tokenizer = Tokenizer(BPE(vocab=_vocabulary(ranks), merges=_merges(ranks), ignore_merges=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(config["pattern"]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    except (KeyError, TypeError) as error:
        raise BadTokenizer(f"{path} is not a tekken.json: {error!r}; download it again") from None
    except Exception as error:  # not JSON, not base64; the bindings raise plain Exception
        raise BadTokenizer(f"{path} is not a tekken.json: {error}; download it again") from None
    put_bos(tokenizer)
    return tokenizer, specials


def put_bos(tokenizer: Tokenizer) -> None:
    """A completion's prompt begins with BOS."""
    tokenizer.post_processor = processors.TemplateProcessing(single=[BOS, "$A"], special_tokens=[(BOS, 1)])


def _ranks(vocab: list[dict[str, Any]], size: int) -> dict[bytes, int]:
    """Tokens by rank. A file holds more than a model uses: only the first `size` count."""
    if not _BYTES <= size <= len(vocab):
        raise ValueError(f"it has {len(vocab)} tokens where {size} are used")
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in vocab[:size]}
    if list(ranks.values()) != list(range(size)) or any(bytes([byte]) not in ranks for byte in range(_BYTES)):
        raise ValueError("its ranks are not in order, or a byte is missing")
    return ranks


def _vocabulary(ranks: dict[bytes, int]) -> dict[str, int]:
    return {token.decode("latin-1").translate(_LETTERS): rank for token, rank in ranks.items()}


def _merges(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """Every pair that makes a token, in the order of the ranks of what it makes."""
    return [
        (
            token[:at].decode("latin-1").translate(_LETTERS),
            token[at:].decode("latin-1").translate(_LETTERS),
        )
        for token in ranks
        for at in range(1, len(token))
        if token[:at] in ranks and token[at:] in ranks
    ]


def _letters() -> dict[int, str]:
    """The letter that stands for each byte in a byte-level vocabulary: itself, where it can be seen."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters = {byte: chr(byte) for byte in seen}
    for number, byte in enumerate(byte for byte in range(_BYTES) if byte not in seen):
        letters[byte] = chr(_BYTES + number)
    return letters


_LETTERS = _letters()
