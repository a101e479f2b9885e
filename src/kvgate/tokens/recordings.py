"""How long a recording is that a content part carries, read from its bytes without decoding them.

Promises: `frames` is never below what a decoder makes of the same bytes, and equal to it when
`is_exact`; None where that cannot be proven (another format, a remote address, damaged base64). What a
header claims is not believed alone: a WAV is measured by the bytes that are there, a FLAC by the frames
that are there. It fetches nothing.
"""

from __future__ import annotations

import base64
import binascii
import re
import string
import struct
from dataclasses import dataclass
from typing import Any

_MAX_CHUNKS = 64
# Ten minutes of FLAC have 6,500 frames, but a body could be nothing else than what looks like one.
MAX_FLAC_MARKS = 30_000
_FLAC_MARK = re.compile(rb"\xff[\xf8\xf9]")
_FORMAT = re.compile(r"[A-Za-z0-9.+-]*")
_BASE64 = (string.ascii_letters + string.digits + "+/").encode()
# Letters that are checked at once: a millisecond.
_STRETCH = 1 << 20
# Beside these, decoders know chunks that change what is decoded.
_HARMLESS = frozenset(
    (
        b"LIST",
        b"fact",
        b"bext",
        b"cue ",
        b"PEAK",
        b"id3 ",
        b"ID3 ",
        b"JUNK",
        b"PAD ",
        b"iXML",
        b"smpl",
        b"inst",
    )
)
_PCM, _FLOAT, _A_LAW, _MU_LAW, _EXTENSIBLE = 1, 3, 6, 7, 0xFFFE
_BITS = {_PCM: (8, 16, 24, 32, 64), _FLOAT: (32, 64), _A_LAW: (8,), _MU_LAW: (8,)}
_SUBFORMAT_TAIL = bytes.fromhex("000000001000800000aa00389b71")
_FLAC_RATES = (0, 88_200, 176_400, 192_000, 8_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000)


@dataclass(frozen=True, slots=True)
class Clip:
    """`frames`: samples of one channel. `rate`: of them in a second. If not exact, a bound from above."""

    frames: int
    rate: int
    is_exact: bool


@dataclass(slots=True)
class Looks:
    """How many places that may begin a frame of FLAC are still looked at in all recordings of a request."""

    left: int = MAX_FLAC_MARKS


def clip_of(part: dict[str, Any], looks: Looks | None = None) -> Clip | None:
    """The recording of an `input_audio` or `audio_url` part; None where its length is not to be seen.

    `looks`: what is shared with the other recordings of the request; None: this is the only one.
    """
    # By its id the engine may know another recording than the one that is sent.
    encoded = None if part.get("uuid") is not None else _encoded(part)
    if encoded is None:
        return None
    try:
        data = Base64Bytes(encoded)
        head = data.at(0, 12)
        if head[:4] == b"RIFF" and head[8:] == b"WAVE":
            return _wav(data)
        return _flac(data.at(0, data.size), looks or Looks()) if head[:4] == b"fLaC" else None
    except (binascii.Error, ValueError, struct.error, IndexError):
        return None


class Base64Bytes:
    """Encoded bytes of which single stretches are decoded. Raises `ValueError` for what is not base64."""

    def __init__(self, encoded: str) -> None:
        if len(encoded) % 4:
            raise ValueError("base64 comes in groups of four letters")
        padding = encoded[-2:].count("=")
        end = len(encoded) - padding
        for at in range(0, end, _STRETCH):
            # Some decoders leave out what is no letter, and find everything behind it elsewhere.
            if encoded[at : min(at + _STRETCH, end)].encode("ascii").translate(None, _BASE64):
                raise ValueError("base64 has other letters")
        self._encoded = encoded
        self.size = len(encoded) // 4 * 3 - padding

    def at(self, begin: int, end: int) -> bytes:
        """The bytes from `begin` to `end`, fewer where they end sooner."""
        first = begin // 3
        raw = base64.b64decode(self._encoded[first * 4 : -(-end // 3) * 4], validate=True)
        return raw[begin - first * 3 : end - first * 3]


def _encoded(part: dict[str, Any]) -> str | None:
    """The recording in base64, where the part itself holds it and engines agree on where it begins."""
    given = part.get("input_audio")
    if given is not None and "audio_url" in part:
        return None
    if isinstance(given, dict):
        data, kind = given.get("data"), given.get("format", "")
        known = isinstance(kind, str) and _FORMAT.fullmatch(kind)
        return data if isinstance(data, str) and known else None
    url = part.get("audio_url")
    if isinstance(url, dict):
        url = url.get("url")
    if not isinstance(url, str) or url[:5].lower() != "data:":
        return None
    comma = url.find(",")
    return url[comma + 1 :] if url[: max(comma, 0)].endswith(";base64") else None


def _wav(data: Base64Bytes) -> Clip | None:
    at, sound, found = 12, None, None
    for _ in range(_MAX_CHUNKS):
        head = data.at(at, at + 8)
        if len(head) < 8:
            break
        name, size = head[:4], int.from_bytes(head[4:], "little")
        begin = at + 8
        if name == b"fmt " and sound is None and found is None:
            sound = _wav_format(data.at(begin, begin + min(size, 40)))
            if sound is None:
                return None
        elif name == b"data" and sound is not None and found is None:
            # An unset or too large size means all that is there.
            is_true = 0 < size <= data.size - begin
            there = size if is_true else data.size - begin
            rate, width = sound
            found = Clip(-(-there // width), rate, is_true and there % width == 0)
            size = there
        elif name not in _HARMLESS:
            return None
        at = begin + size + size % 2
    else:
        return None
    return found


def _wav_format(raw: bytes) -> tuple[int, int] | None:
    """Samples in a second, and bytes of one sample of all channels."""
    kind, channels, rate, _, width, bits = struct.unpack_from("<HHIIHH", raw)
    if kind == _EXTENSIBLE:
        if len(raw) < 40 or raw[26:40] != _SUBFORMAT_TAIL:
            return None
        (kind,) = struct.unpack_from("<H", raw, 24)
    if bits not in _BITS.get(kind, ()) or not channels or not rate or width != channels * bits // 8:
        return None
    return rate, width


def _flac(raw: bytes, looks: Looks) -> Clip | None:
    at, rate, total = 4, 0, 0
    for index in range(_MAX_CHUNKS):
        kind, size = raw[at], int.from_bytes(raw[at + 1 : at + 4], "big")
        if index == 0:
            if kind & 0x7F or size != 34:
                return None
            facts = int.from_bytes(raw[at + 14 : at + 22], "big")
            rate, total = facts >> 44, facts & (1 << 36) - 1
        at += 4 + size
        if kind & 0x80:
            break
    else:
        return None
    frames = _flac_frames(raw, at, rate, looks) if rate and at < len(raw) else None
    # Every frame that a decoder accepts is among them, so more than these it cannot make.
    return None if frames is None else Clip(frames, rate, frames == total)


def _flac_frames(raw: bytes, at: int, rate: int, looks: Looks) -> int | None:
    """Samples of all that looks like a frame from `at` on; None if there is too much, or another rate."""
    samples = 0
    for mark in _FLAC_MARK.finditer(raw, at):
        begin = mark.start()
        looks.left -= 1
        frame = _flac_frame(raw[begin : begin + 16], rate) if looks.left >= 0 else None
        if frame is None:
            return None
        samples += frame
    return samples


def _flac_frame(head: bytes, rate: int) -> int | None:
    """Samples of the frame that begins so: 0 if none does, None if it has another rate than the stream."""
    if len(head) < 6:
        return 0
    blocks, rates = head[2] >> 4, head[2] & 15
    ones = 8 - (head[4] ^ 0xFF).bit_length()
    if not blocks or rates == 15 or ones in (1, 8):
        return 0
    at = 4 + max(1, ones)
    behind = at + {6: 1, 7: 2}.get(blocks, 0)
    end = behind + {12: 1, 13: 2, 14: 2}.get(rates, 0)
    if end >= len(head) or _crc8(head[:end]) != head[end]:
        return 0
    if rates:
        value = int.from_bytes(head[behind:end], "big")
        own = {12: value * 1_000, 13: value, 14: value * 10}.get(rates)
        if rate != (_FLAC_RATES[rates] if own is None else own):
            return None
    if blocks in (6, 7):
        return int.from_bytes(head[at:behind], "big") + 1
    return 192 if blocks == 1 else 576 << blocks - 2 if blocks < 6 else 256 << blocks - 8


def _crc8_step(value: int) -> int:
    for _ in range(8):
        value = (value << 1 ^ 0x07) & 0xFF if value & 0x80 else value << 1
    return value


_CRC8 = tuple(map(_crc8_step, range(256)))


def _crc8(raw: bytes) -> int:
    value = 0
    for byte in raw:
        value = _CRC8[value ^ byte]
    return value
