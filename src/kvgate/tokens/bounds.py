"""Bounds on the tokens of a text without tokenizing it.

Promises: `most` is never below the tokens of a text, for tokenizers that fall back to bytes (byte-level
BPE, or BPE with `byte_fallback`) and whose normalizer grows a text by a known factor at most. `least` is
never above them, for tokenizers that leave every ASCII letter and digit of a text where it is: each of
those is in some token, and no token has more than a known number. (Nothing of the kind holds for blanks:
some special tokens take all that stand beside them.) There are no bounds for other tokenizers.
"""

from __future__ import annotations

import json
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from kvgate.tokens.records import CannotCount

if TYPE_CHECKING:
    from kvgate.tokens.loader import ModelFiles

# Room for what a tokenizer writes around a text: a leading mark, BOS, EOS.
AROUND = 4
_WORD = string.ascii_letters + string.digits
_WORD_BYTES = _WORD.encode()
_NOT_ASCII = bytes(range(0x80, 0x100))
# Looked at at once, in characters: a millisecond.
_STRETCH = 1 << 20
# These move or cut blanks and signs, and leave letters and digits alone.
_KEEPING = frozenset({"ByteLevel", "Metaspace", "Digits", "Whitespace", "WhitespaceSplit", "UnicodeScripts"})


@dataclass(frozen=True, slots=True)
class Bounds:
    """`longest`: UTF-8 bytes of the longest token. `growth`: bytes that the normalizer makes of one."""

    longest: int
    growth: int

    def most(self, text: str) -> int:
        """At most one token for each byte, after the normalizer."""
        if text.isascii():
            return len(text) + AROUND
        return len(text.encode("utf-8", "surrogatepass")) * self.growth + AROUND


@dataclass(frozen=True, slots=True)
class Words:
    """`in_token`: the most ASCII letters and digits that one token has. `composes`: the normalizer may
    make one character of a letter and a mark after it, as NFC does."""

    in_token: int
    composes: bool

    def least(self, text: str, enough: int) -> int:
        """Tokens of `text` at least; not looked at further than `enough` of them need."""
        wanted = enough * self.in_token
        words = at = 0
        while at < len(text) and words < wanted:
            stretch = text[at : at + _STRETCH]
            at += _STRETCH
            try:
                raw = stretch.encode()
            except UnicodeEncodeError:
                break
            words += len(raw) - len(raw.translate(None, _WORD_BYTES))
            if self.composes and len(raw) > len(stretch):
                # At worst each of the others is a mark that has a letter before it.
                words -= len(stretch) - len(raw.translate(None, _NOT_ASCII))
        if self.composes and at < len(text):
            words -= 1  # for a mark just behind what was looked at
        return max(0, -(-words // self.in_token))


class Proofs:
    """What is proven of one model's prompts before they are counted.

    `words`: what bounds a text from below (None: nothing does).
    """

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self._around = files.reference.num_special_tokens_to_add(False)
        limits = files.bounds
        self.words = None if limits is None else words_of(files.reference, limits.growth)

    def most(self, text: str) -> int | None:
        """The most tokens that a text can have, specials around it included; None: no such bound."""
        limits = self._files.bounds
        return None if limits is None else limits.most(text) + self._around

    def written(self, fields: dict[str, Any]) -> str:
        """The text that is tokenized for a chat without media. Raises `CannotCount`."""
        if self._files.template is None:
            raise CannotCount("no template writes this model's chats")
        rendered = self._files.template.render(fields)
        if rendered.images or rendered.audio:
            raise CannotCount("media take more tokens than their text")
        return rendered.text


def words_of(reference: Tokenizer, growth: int) -> Words | None:
    """What bounds a text's tokens from below; None where nothing is proven.

    `growth`: of `Bounds`, where there are bounds: above 1, the normalizer composes.
    """
    if type(reference.model).__name__ != "BPE" or not _keeps_words(_state(reference.pre_tokenizer)):
        return None
    # A character that the vocabulary lacks may vanish, or share an unknown token with any number.
    if any(reference.token_to_id(character) is None for character in _WORD):
        return None
    in_token = 1
    for token in sorted(reference.get_vocab(), key=len, reverse=True):
        if len(token) <= in_token:
            break
        in_token = max(in_token, len(token) - len(token.translate(_NO_WORD)))
    return Words(in_token, composes=growth > 1)


_NO_WORD = dict.fromkeys(map(ord, _WORD))


def _keeps_words(pre_tokenizer: dict[str, Any]) -> bool:
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        return all(map(_keeps_words, pre_tokenizer["pretokenizers"]))
    if kind in ("Split", "Punctuation"):
        return pre_tokenizer.get("behavior") != "Removed"
    return kind is None or kind in _KEEPING


def _state(component: Any) -> dict[str, Any]:
    return {} if component is None else dict(json.loads(component.__getstate__()))
