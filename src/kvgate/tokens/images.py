"""Tokens that an image becomes, for models whose rule is arithmetic.

Promises: exact where the image's size can be read from the request (a `data:` URL with a PNG, JPEG,
GIF or WebP header) and the model's rule is known; else the most that the model makes of any image,
marked as a bound; else None, never a guess. It decodes only the first bytes of an image and fetches
nothing.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from dataclasses import dataclass
from typing import Any, Protocol

# A JPEG may carry a preview of up to 64 kB before its size.
HEADER_BASE64 = 262_144


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """Tokens that one image puts in place of the one placeholder that the template writes."""

    tokens: int
    is_exact: bool


class ImageRule(Protocol):
    """How one kind of model counts an image of a size in pixels, None when it is not known."""

    def tokens(self, size: tuple[int, int] | None) -> ImageTokens: ...


@dataclass(frozen=True, slots=True)
class FixedRule:
    """Every image is the same number of tokens."""

    each: int
    is_exact: bool = True

    def tokens(self, size: tuple[int, int] | None) -> ImageTokens:
        return ImageTokens(self.each, self.is_exact)


@dataclass(frozen=True, slots=True)
class PatchRule:
    """Qwen2-VL and its successors: sides rounded to whole merged patches, area within two bounds."""

    factor: int  # pixels of the side of a merged patch
    min_pixels: int
    max_pixels: int

    def tokens(self, size: tuple[int, int] | None) -> ImageTokens:
        if size is None:
            return ImageTokens(self.max_pixels // self.factor**2, False)
        width, height = size
        factor = self.factor
        tall, wide = round(height / factor) * factor, round(width / factor) * factor
        if tall * wide > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            tall = max(factor, math.floor(height / scale / factor) * factor)
            wide = max(factor, math.floor(width / scale / factor) * factor)
        elif tall * wide < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            tall = math.ceil(height * scale / factor) * factor
            wide = math.ceil(width * scale / factor) * factor
        return ImageTokens(tall * wide // factor**2, True)


def image_rule(config: dict[str, Any], processor: dict[str, Any]) -> ImageRule | None:
    """The rule of the model whose config.json and preprocessor_config.json these are."""
    kind = str(config.get("model_type", ""))
    if kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"):
        size = processor.get("size")
        edges: dict[str, Any] = size if isinstance(size, dict) else {}
        numbers = [
            processor.get("patch_size"),
            processor.get("merge_size"),
            processor.get("min_pixels") or edges.get("shortest_edge"),
            processor.get("max_pixels") or edges.get("longest_edge"),
        ]
        known = [number for number in numbers if isinstance(number, int) and number > 0]
        if len(known) == len(numbers):
            patch, merge, low, high = known
            return PatchRule(patch * merge, low, high)
        return None
    if kind == "gemma3":
        each = config.get("mm_tokens_per_image", 256)
        # Around the image come two marks and two empty lines, which may merge with their neighbours:
        # the bound counts them whole.
        return FixedRule(each + 4, False) if isinstance(each, int) else None
    vision = config.get("vision_config")
    if kind == "llava" and isinstance(vision, dict):
        side, cell = vision.get("image_size"), vision.get("patch_size")
        if isinstance(side, int) and isinstance(cell, int) and cell > 0:
            return FixedRule((side // cell) ** 2)
    return None


def image_size(part: dict[str, Any]) -> tuple[int, int] | None:
    """Width and height in pixels of a content part's image, where the request itself shows them."""
    if part.get("uuid") is not None:
        return None  # by its id the engine may know another image than the one that is sent
    url = part.get("image_url")
    if isinstance(url, dict):
        url = url.get("url")
    if not isinstance(url, str) or not url.startswith("data:"):
        return None
    head, comma, encoded = url[: HEADER_BASE64 + 64].partition(",")
    if not comma or not head.endswith(";base64"):
        return None
    encoded = encoded[:HEADER_BASE64].rstrip("=")
    try:
        raw = base64.b64decode(encoded[: len(encoded) // 4 * 4])
    except (binascii.Error, ValueError):
        return None
    try:
        size = _size(raw)
    except (struct.error, IndexError):
        return None
    return size if size and min(size) > 0 else None


def _size(raw: bytes) -> tuple[int, int] | None:
    if raw.startswith(b"\x89PNG\r\n\x1a\n"):
        width, height = struct.unpack_from(">II", raw, 16)
        return width, height
    if raw[:6] in (b"GIF87a", b"GIF89a"):
        width, height = struct.unpack_from("<HH", raw, 6)
        return width, height
    if raw[:4] == b"RIFF" and raw[8:12] == b"WEBP":
        return _webp(raw)
    return _jpeg(raw) if raw.startswith(b"\xff\xd8") else None


def _webp(raw: bytes) -> tuple[int, int] | None:
    kind = raw[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(raw[24:27], "little"), 1 + int.from_bytes(raw[27:30], "little")
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", raw, 26)
        return width & 0x3FFF, height & 0x3FFF
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", raw, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return None


def _jpeg(raw: bytes) -> tuple[int, int] | None:
    at = 2
    while at + 9 < len(raw):
        if raw[at] != 0xFF:
            return None
        marker = raw[at + 1]
        if marker == 0xFF:
            at += 1
            continue
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", raw, at + 5)
            return width, height
        at += 2 + int(struct.unpack_from(">H", raw, at + 2)[0])
    return None
