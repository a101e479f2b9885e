"""SentencePiece models as `tokenizers`, so that they are counted like every other tokenizer.

Promises: for a directory without tokenizer.json, the counts of the tokenizer that transformers (5)
makes of it, which is what vLLM loads: by the class that tokenizer_config.json names. Without a class,
and for Mistral's own files, that is what the `sentencepiece` library itself does. A class that does
something else is refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram

from kvgate.tokens.records import BadTokenizer
from kvgate.tokens.sentencepiece_file import (
    CONTROL,
    NORMAL,
    USER_DEFINED,
    SentencePieceModel,
    read_sentencepiece,
)
from kvgate.tokens.tekken import put_bos

MARK = "▁"
_LLAMA = ("LlamaTokenizer", "CodeLlamaTokenizer")
_T5 = "T5Tokenizer"
_GENERIC = ("", "TokenizersBackend", "PreTrainedTokenizer", "MistralCommonBackend")
# Model types whose directories transformers reads in the generic way, whatever class is named.
_GENERIC_MODELS = frozenset(
    (
        *("arctic", "ernie4_5", "ernie4_5_moe", "fuyu", "granite", "hyperclovax", "internlm2", "internlm3"),
        *("jamba", "llava", "llava_next", "minicpm3", "minicpmv", "ministral", "ministral3", "mistral"),
        *("mistral3", "mixtral", "molmo", "nemotron", "olmo2", "persimmon", "phi3", "phi3_v", "phimoe"),
        *("pixtral", "stablelm", "vipllava", "voxtral"),
    )
)
_T5_EXTRA_IDS = 100
_CONVERT = (
    "python -c \"from transformers import AutoTokenizer; AutoTokenizer.from_pretrained('{0}')"
    ".save_pretrained('{0}')\" (needs: pip install transformers sentencepiece protobuf) makes one"
)


def convert(path: Path, config: dict[str, Any], model_type: str, more: dict[str, Any]) -> Tokenizer:
    """The tokenizer of the directory with the SentencePiece model at `path`. Raises `BadTokenizer`.

    `config`: tokenizer_config.json; `model_type`: as in config.json; `more`: added_tokens.json.
    """
    name = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    if name in _LLAMA and model_type in _GENERIC_MODELS:
        name = ""
    if name not in (*_LLAMA, *_GENERIC, _T5):
        raise BadTokenizer(
            f"{path.parent} has no tokenizer.json, and its class {name} adds rules of its own to "
            f"{path.name}: " + _CONVERT.format(path.parent)
        )
    model = read_sentencepiece(path)
    legacy = bool(config.get("legacy", name not in _LLAMA))
    try:
        if name == _T5:
            tokenizer = _t5(model)
        elif name in _LLAMA:
            tokenizer = _llama(model, legacy)
        else:
            tokenizer = faithful(model, every_chunk=legacy)
        _add_tokens(tokenizer, model, config, more, is_generic=name in _GENERIC)
        _add_ends(tokenizer, config, always_eos=name == _T5)
    except Exception as error:  # the bindings raise plain Exception
        raise BadTokenizer(f"{path} cannot be used: {error}; download it again") from None
    return tokenizer


def native_sentencepiece(path: Path) -> tuple[Tokenizer, list[str]]:
    """Mistral's own file, as mistral-common counts a text with it, and its control tokens' names.

    Raises `BadTokenizer`.
    """
    model = read_sentencepiece(path)
    try:
        tokenizer = faithful(model, reads_names=False)
    except Exception as error:  # the bindings raise plain Exception
        raise BadTokenizer(f"{path} cannot be used: {error}; download it again") from None
    put_bos(tokenizer)
    return tokenizer, [piece.text for piece in model.pieces if piece.kind == CONTROL]


def faithful(model: SentencePieceModel, every_chunk: bool = True, reads_names: bool = True) -> Tokenizer:
    """Cuts a text as the `sentencepiece` library does.

    `every_chunk`: what follows an added token gets a leading space too, not only the whole text.

    `reads_names`: a byte's or a control piece's name that stands alone between two user-defined pieces is
    taken for that piece, as transformers does and the library does not.
    """
    own = [piece.text for piece in model.pieces if piece.kind == USER_DEFINED]
    tokenizer = Tokenizer(_unigram(model) if model.is_unigram else _bpe(model, ignore_merges=bool(own)))
    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.drops_spaces:
        steps += [
            normalizers.Replace(Regex(r"\A +| +\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    if model.adds_prefix and every_chunk:
        steps.append(normalizers.Prepend(MARK if model.marks_spaces else " "))
    if model.marks_spaces:
        steps.append(normalizers.Replace(" ", MARK))
    tokenizer.normalizer = normalizers.Sequence(steps)
    splits: list[Any] = []
    if model.adds_prefix and not every_chunk:
        splits.append(pre_tokenizers.Metaspace(MARK, prepend_scheme="first", split=False))
    if own:
        # The library takes these whole and never merges over them.
        longest_first = "|".join(re.escape(text) for text in sorted(own, key=len, reverse=True))
        splits.append(pre_tokenizers.Split(Regex(longest_first), "isolated"))
        if not reads_names and not model.is_unigram:
            splits.append(pre_tokenizers.Split(Regex(_lone_names(model)), "isolated"))
    if splits:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    return tokenizer


def _llama(model: SentencePieceModel, legacy: bool) -> Tokenizer:
    """Transformers' own way for this class: any piece may be merged, in the order of the ids."""
    vocabulary = _vocabulary(model)
    tokenizer = Tokenizer(
        BPE(vocab=vocabulary, merges=_merges_by_id(vocabulary), fuse_unk=True, byte_fallback=True)
    )
    scheme = "always" if legacy else "first"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(MARK, prepend_scheme=scheme, split=False)
    return tokenizer


def _t5(model: SentencePieceModel) -> Tokenizer:
    extra = [(f"<extra_id_{number}>", 0.0) for number in reversed(range(_T5_EXTRA_IDS))]
    scores = [(piece.text, piece.score) for piece in model.pieces]
    tokenizer = Tokenizer(Unigram(vocab=scores + extra, unk_id=model.unk_id, byte_fallback=False))
    if model.charsmap:
        tokenizer.normalizer = normalizers.Precompiled(model.charsmap)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Metaspace(MARK, prepend_scheme="always", split=True),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text, _ in extra])
    return tokenizer


def _bpe(model: SentencePieceModel, ignore_merges: bool) -> BPE:
    return BPE(
        vocab=_vocabulary(model),
        merges=_merges_by_score(model),
        unk_token=model.unk_piece,
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
        ignore_merges=ignore_merges,
    )


def _lone_names(model: SentencePieceModel) -> str:
    """The first token of each name of a piece that no text is made of, where it stands alone.

    Cut behind that token, the name is no entry of the vocabulary any more, and its letters stay as they
    are.
    """
    names = [piece.text for piece in model.pieces if piece.kind not in (NORMAL, USER_DEFINED)]
    plain = Tokenizer(_bpe(model, ignore_merges=False)).encode_batch(names)
    firsts = [encoded.offsets[0][1] for encoded in plain]
    pairs = [(name[:at], name[at:]) for name, at in zip(names, firsts, strict=True)]
    return r"\A(?:" + "|".join(rf"{re.escape(begin)}(?={re.escape(end)}\z)" for begin, end in pairs) + ")"


def _unigram(model: SentencePieceModel) -> Unigram:
    scores = [(piece.text, piece.score) for piece in model.pieces]
    return Unigram(vocab=scores, unk_id=model.unk_id, byte_fallback=model.byte_fallback)


def _vocabulary(model: SentencePieceModel) -> dict[str, int]:
    return {piece.text: number for number, piece in enumerate(model.pieces)}


def _merges_by_score(model: SentencePieceModel) -> list[tuple[str, str]]:
    """The best score first, as the library merges; only normal pieces are made by merging."""
    normal = {piece.text: piece.score for piece in model.pieces if piece.kind == NORMAL}
    ranked = [
        (-score, number, text[:at], text[at:])
        for number, (text, score) in enumerate(normal.items())
        for at in range(1, len(text))
        if text[:at] in normal and text[at:] in normal
    ]
    return [(left, right) for _, _, left, right in sorted(ranked)]


def _merges_by_id(vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    return [
        (text[:at], text[at:])
        for text in vocabulary
        for at in range(1, len(text))
        if text[:at] in vocabulary and text[at:] in vocabulary
    ]


def _add_tokens(
    tokenizer: Tokenizer,
    model: SentencePieceModel,
    config: dict[str, Any],
    more: dict[str, Any],
    is_generic: bool,
) -> None:
    """What is taken out of a text before it is cut, as transformers collects it. The first one wins.

    `is_generic`: without a class of its own; the tokenizer then finds user-defined pieces by itself.
    """
    # These are looked for in the text as it was written, so that each chunk gets its leading space.
    raw = is_generic and model.adds_prefix
    kinds = (CONTROL,) if is_generic else (CONTROL, USER_DEFINED)
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": None}
    names = {kind: _content(config.get(kind, usual)) for kind, usual in named.items()}
    special = {text for text in names.values() if text}
    found: dict[str, AddedToken] = {}
    decoder = config.get("added_tokens_decoder")
    decoder = decoder if isinstance(decoder, dict) else {}
    for _, entry in sorted(decoder.items(), key=lambda item: int(item[0])):
        token = AddedToken(
            entry["content"],
            single_word=bool(entry.get("single_word")),
            lstrip=bool(entry.get("lstrip")),
            rstrip=bool(entry.get("rstrip")),
            normalized=not raw and bool(entry.get("normalized")),
            special=bool(entry.get("special")) or entry["content"] in special,
        )
        found.setdefault(token.content, token)
    if not decoder:
        for text in more:
            found.setdefault(text, AddedToken(text, normalized=not raw and text not in special))
    for text in special:
        found.setdefault(text, AddedToken(text, normalized=False, special=True))
    for piece in model.pieces:
        if piece.kind in kinds:
            is_control = piece.kind == CONTROL
            found.setdefault(piece.text, AddedToken(piece.text, normalized=False, special=is_control))
    tokenizer.add_tokens(list(found.values()))


def _add_ends(tokenizer: Tokenizer, config: dict[str, Any], always_eos: bool) -> None:
    bos = _content(config.get("bos_token", "<s>")) if config.get("add_bos_token") else None
    eos = _content(config.get("eos_token", "</s>")) if always_eos or config.get("add_eos_token") else None
    ends = [text for text in (bos, eos) if text]
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
            special_tokens=[(text, tokenizer.token_to_id(text) or 0) for text in ends],
        )


def _content(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None
