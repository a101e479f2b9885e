"""A SentencePiece model file (`tokenizer.model`, `spiece.model`), read without the library.

Promises: what the file says about its pieces, and about what is done to a text before it is cut, or
`BadTokenizer` for a file that is damaged or something else. It reads the few fields of the protocol
buffer that decide a count and passes over the rest.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvgate.tokens.records import BadTokenizer

# Kinds of pieces, and of models, by SentencePiece's own numbers.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_UNIGRAM, _BPE = 1, 2
# Field numbers.
_PIECES, _TRAINING, _NORMALIZING = 1, 2, 3
_MODEL_TYPE, _SUFFIX, _BYTE_FALLBACK, _UNK_ID, _UNK_PIECE = 3, 24, 35, 40, 45
_CHARSMAP, _ADD_PREFIX, _DROP_SPACES, _MARK_SPACES = 2, 3, 4, 5
_VARINT_MAX = 10


@dataclass(frozen=True, slots=True)
class Piece:
    """One entry of the vocabulary; its place in the file is its id."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """What decides how a text is cut. The defaults of absent fields are SentencePiece's."""

    pieces: tuple[Piece, ...]
    is_unigram: bool
    byte_fallback: bool
    unk_id: int
    unk_piece: str
    charsmap: bytes  # the compiled normalization, empty for none
    adds_prefix: bool  # a space before the text
    drops_spaces: bool  # those at the ends, and all but one between words
    marks_spaces: bool  # a space becomes the mark that the pieces are written with


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Reads the file at `path`. Raises `BadTokenizer`."""
    try:
        model = _model(path.read_bytes())
    except (ValueError, struct.error) as error:
        raise BadTokenizer(
            f"{path} is not a SentencePiece model, or is damaged: {error}; download it again, "
            "or the model's tokenizer.json"
        ) from None
    return model


def _model(data: bytes) -> SentencePieceModel:
    pieces: list[Piece] = []
    training: dict[int, int | bytes] = {}
    normalizing: dict[int, int | bytes] = {}
    for number, value in _fields(data):
        if number == _PIECES:
            pieces.append(_piece(_bytes(value)))
        elif number == _TRAINING:
            training.update(_fields(_bytes(value)))
        elif number == _NORMALIZING:
            normalizing.update(_fields(_bytes(value)))
    kind = training.get(_MODEL_TYPE, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE):
        raise ValueError(f"models of type {kind!r} (words, characters) are not for language models")
    if not pieces:
        raise ValueError("it has no pieces")
    if len({piece.text for piece in pieces}) != len(pieces):
        raise ValueError("a piece is there twice")
    if training.get(_SUFFIX):
        raise ValueError("it marks spaces behind the words, which is not supported")
    unk_id = _int(training.get(_UNK_ID, 0))
    if not 0 <= unk_id < len(pieces):
        raise ValueError(f"its unknown piece {unk_id} does not exist")
    return SentencePieceModel(
        pieces=tuple(pieces),
        is_unigram=kind == _UNIGRAM,
        byte_fallback=bool(training.get(_BYTE_FALLBACK, 0)),
        unk_id=unk_id,
        unk_piece=_bytes(training.get(_UNK_PIECE, b"<unk>")).decode(),
        charsmap=_bytes(normalizing.get(_CHARSMAP, b"")),
        adds_prefix=bool(normalizing.get(_ADD_PREFIX, 1)),
        drops_spaces=bool(normalizing.get(_DROP_SPACES, 1)),
        marks_spaces=bool(normalizing.get(_MARK_SPACES, 1)),
    )


def _piece(data: bytes) -> Piece:
    fields = dict(_fields(data))
    text = _bytes(fields.get(1, b"")).decode()
    (score,) = struct.unpack("<f", _bytes(fields.get(2, bytes(4))))
    if not text or score != score:
        raise ValueError("a piece has no text or no score")
    return Piece(text, score, _int(fields.get(3, NORMAL)))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field of one message; four and eight bytes of fixed width as they are."""
    at, end = 0, len(data)
    while at < end:
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == 2:
            length, at = _varint(data, at)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"a field of unknown form at byte {at}")
        if number == 0 or at + length > end:
            raise ValueError(f"it ends within a field at byte {at}")
        yield number, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(_VARINT_MAX):
        if at >= len(data):
            raise ValueError("it ends within a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, at
    raise ValueError(f"a number without end at byte {at}")


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where text belongs")
    return value


def _int(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("text where a number belongs")
    # Negative numbers are written as 64 bits.
    return value - (1 << 64) if value >> 63 else value
