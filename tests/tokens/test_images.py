"""Image tokens follow the model's arithmetic, or are a bound that says so."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from tiny import write_model

from kvgate.tokens import load
from kvgate.tokens.images import FixedRule, ImageTokens, PatchRule, image_rule, image_size

QWEN = {"patch_size": 14, "merge_size": 2, "min_pixels": 3_136, "max_pixels": 12_845_056}


def part(raw: bytes, kind: str = "image/png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(raw).decode()}"}}


def png(width: int, height: int) -> bytes:
    return (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I4sII", 13, b"IHDR", width, height)
        + b"\x08\x06\0\0\0"
        + b"\0" * 60
    )


def jpeg(width: int, height: int) -> bytes:
    preview = b"\xff\xe1" + struct.pack(">H", 502) + b"\0" * 500
    frame = b"\xff\xc0" + struct.pack(">HBHH", 17, 8, height, width)
    return b"\xff\xd8" + preview + frame + b"\0" * 30


@pytest.mark.parametrize(
    "raw",
    [
        png(640, 480),
        jpeg(640, 480),
        b"GIF89a" + struct.pack("<HH", 640, 480) + b"\0" * 20,
        b"RIFF\0\0\0\0WEBPVP8 " + b"\0" * 10 + struct.pack("<HH", 640, 480) + b"\0" * 9,
        b"RIFF\0\0\0\0WEBPVP8X" + b"\0" * 8 + (639).to_bytes(3, "little") + (479).to_bytes(3, "little"),
        b"RIFF\0\0\0\0WEBPVP8L" + b"\0" * 4 + b"\x2f" + struct.pack("<I", 639 | 479 << 14) + b"\0" * 9,
    ],
)
def test_the_size_is_read_from_the_first_bytes(raw: bytes) -> None:
    assert image_size(part(raw)) == (640, 480)


@pytest.mark.parametrize(
    "broken",
    [
        {"image_url": {"url": "https://example.org/a.png"}},
        {"image_url": {"url": "data:image/png;base64,!!!!"}},
        {"image_url": {"url": "data:image/png,plain"}},
        {"image_url": 5},
        {},
        part(png(640, 480)[:18]),
        {**part(png(640, 480)), "uuid": "one"},
        part(png(0, 480)),
        part(b"\xff\xd8\xff"),
        part(b"unknown format" * 10),
    ],
)
def test_a_size_that_is_not_to_be_seen_is_not_guessed(broken: dict[str, Any]) -> None:
    assert image_size(broken) is None


@pytest.mark.parametrize(
    ("size", "tokens"), [((640, 480), 391), ((28, 28), 4), ((5, 1_000), 29), ((8_000, 6_000), 16_170)]
)
def test_patches_are_counted_between_the_models_bounds(size: tuple[int, int], tokens: int) -> None:
    rule = image_rule({"model_type": "qwen2_5_vl"}, QWEN)

    assert rule is not None
    assert rule.tokens(size) == ImageTokens(tokens, True)


def test_an_image_of_unknown_size_costs_the_most_the_model_makes() -> None:
    assert PatchRule(28, 3_136, 12_845_056).tokens(None) == ImageTokens(16_384, False)


def test_models_with_a_fixed_number_are_known() -> None:
    llava = {"model_type": "llava", "vision_config": {"image_size": 336, "patch_size": 14}}

    assert image_rule(llava, {}) == FixedRule(576)
    assert image_rule({"model_type": "gemma3"}, {}) == FixedRule(260, False)


@pytest.mark.parametrize(
    ("config", "processor"),
    [
        ({}, {}),
        ({"model_type": "new_vl"}, QWEN),
        ({"model_type": "qwen2_vl"}, {}),
        ({"model_type": "llava"}, {}),
    ],
)
def test_an_unknown_model_has_no_rule(config: dict[str, Any], processor: dict[str, Any]) -> None:
    assert image_rule(config, processor) is None


def test_a_template_of_text_has_no_placeholder_that_an_image_could_replace(tmp_path: Path) -> None:
    text = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
    write_model(tmp_path, text)
    llava = {"model_type": "llava", "vision_config": {"image_size": 336, "patch_size": 14}}
    (tmp_path / "config.json").write_text(json.dumps(llava))
    content = [part(png(640, 480)), {"type": "text", "text": "hello"}]
    counter = load(tmp_path)
    count = counter.count_chat({"messages": [{"role": "user", "content": content}]})
    # The engine writes the placeholder, here a token that becomes 576, on a line of its own.
    written = counter.count_text("<|im_start|><|image|>\nhello<|im_end|>", add_special=False)

    assert count.prompt_tokens >= written.prompt_tokens - 1 + 576
    assert not count.is_exact
