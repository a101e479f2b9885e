"""Texts on which tokenizers disagree: what an accelerator must count like the reference.

Promises: the same texts for the same seed. They mix scripts, emoji with joiners, combining marks,
odd spaces, digits, code, long runs and pieces of special tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

_PIECES = (
    "Hello", " world", "the quick brown fox", "don't", "I'LL", "'s", "it’s", "naïve", "ÅNGSTRÖM",
    "ſ", "İstanbul", "你好", "世界。", "日本語のテキスト", "カタカナ", "한국어",
    "مرحبا بالعالم", "שלום", "हिन्दी",
    "ไทย", "Ελληνικά", "Привет", "ქართული", "é", "e\u0301", "a\u0300\u0301\u0302", "\u0338", "각",
    "각", "ẛ\u0323", "ﬁ", "½", "Ⅷ", "٣٤", "१२३", "\U0001f642",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466", "\U0001f1e9\U0001f1ea",
    "\U0001f3f3\ufe0f\u200d\U0001f308", "\U0001f44d\U0001f3fd", "\u200d", "\u200b", "\ufeff",
    "\u00a0", "\u3000", "\u2028", "\u0085", "\u00ad", "123", "1234567", "3.14159", "1,000,000",
    "0x1F", "v2.0.1", "2024-05-06", " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n", "\n ",
    "    return", "\x00", "\x1f", "\x7f", "def f(x):\n    return x**2\n",
    "{\"a\": [1, 2, {\"b\": null}]}", "<div class=\"x\">", "SELECT * FROM t;", "$x_1^2$", "!!!",
    "???", "...", "—", "“quoted”", "#hashtag", "@user", "a/b\\c", "snake_case", "camelCase",
    "HTTPServer", "<|", "|>", "<|im_start", "im_end|>", "<think>", "</think>", "<start_of",
    "[INST]", "<s>", "▁", "Ġ", "<0x0A>",
)  # fmt: skip
_RUNS = (
    "a",
    " ",
    "\n",
    "\t",
    "1",
    "中",
    "!",
    "é",
    "🙂",
    "\u0301",
    "=",
    "-",
    "aB",
    " a",
    "\r\n",
    "ا",
    "\u00a0",
)


def check_texts(seed: int, how_many: int, tokens: Sequence[str]) -> list[str]:
    """`how_many` mixed texts, with some of the `tokens` (the added ones) inside."""
    random = Random(seed)
    texts = ["", *_PIECES, *(unit * times for unit in _RUNS for times in (2, 3, 17, 300))]
    while len(texts) < how_many:
        pieces = [random.choice(_PIECES) for _ in range(random.randint(1, 24))]
        if tokens and random.random() < 0.3:
            pieces.insert(random.randint(0, len(pieces)), random.choice(tokens))
        if random.random() < 0.2:
            pieces.append(random.choice(_RUNS) * random.randint(2, 60))
        texts.append(random.choice(("", " ")).join(pieces))
    return texts
