"""Tokens that a recording becomes, for models whose rule is arithmetic.

Promises: exact where the recording's length can be read from the request (see `recordings`) and the
model's rule is known; else the most that the model makes of any recording, where it cuts long ones,
marked as a bound; else None, never a guess. Kept in step with vLLM's models (0.32).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvgate.tokens.recordings import Clip

_QWEN2_WRITTEN = "Audio {}: <|audio_bos|><|AUDIO|><|audio_eos|>"


@dataclass(frozen=True, slots=True)
class AudioTokens:
    """Tokens that one recording puts in place of its placeholder."""

    tokens: int
    is_exact: bool


@dataclass(frozen=True, slots=True)
class AudioRule:
    """How one model counts a recording.

    `rate`: samples in a second, after the engine has converted the recording.
    `of_samples`: tokens of so many samples; never fewer for more of them.
    `longest`: the samples after which the model cuts (0: all recordings are alike); None: it takes all.
    `written`: what the engine itself puts before a message whose template takes only text; `{}` is the
    recording's number in the chat.
    `placeholder`: the part of it that is replaced.
    """

    rate: int
    of_samples: Callable[[int], int]
    longest: int | None
    written: str
    placeholder: str
    is_exact: bool = True

    def tokens(self, clip: Clip | None) -> AudioTokens | None:
        """None where the length is not known and the model does not cut."""
        if clip is None:
            return None if self.longest is None else AudioTokens(self.of_samples(self.longest), False)
        lengths = resampled(clip.frames, clip.rate, self.rate)
        if self.longest is not None:
            lengths = {min(length, self.longest) for length in lengths}
        counts = {self.of_samples(length) for length in lengths}
        return AudioTokens(max(counts), self.is_exact and clip.is_exact and len(counts) == 1)


def resampled(frames: int, rate: int, wanted: int) -> set[int]:
    """The lengths that resamplers make: most round up, torchaudio does so in single precision."""
    if rate == wanted:
        return {frames}
    divisor = math.gcd(rate, wanted)
    up, down = wanted // divisor, rate // divisor
    (single,) = struct.unpack("<f", struct.pack("<f", up * frames / down))
    return {_up(frames * up, down), math.ceil(single)}


def audio_rule(
    config: dict[str, Any], preprocessor: dict[str, Any], processor: dict[str, Any]
) -> AudioRule | None:
    """The rule of the model whose config.json, preprocessor_config.json, processor_config.json these are."""
    make = _RULES.get(str(config.get("model_type", "")))
    nested = processor.get("feature_extractor") or processor.get("audio_processor")
    extractor = nested if isinstance(nested, dict) else preprocessor
    return None if make is None else make(config, extractor, processor)


def _qwen2(_: dict[str, Any], extractor: dict[str, Any], __: dict[str, Any]) -> AudioRule | None:
    whisper = _whisper(extractor)
    if whisper is None:
        return None
    rate, hop, longest = whisper
    # Of a last frame that is not whole, only its padding is dropped.
    count = partial(_by_four, hop, longest // hop)
    return AudioRule(rate, count, longest, _QWEN2_WRITTEN, "<|AUDIO|>")


def _qwen3(_: dict[str, Any], extractor: dict[str, Any], __: dict[str, Any]) -> AudioRule | None:
    whisper = _whisper(extractor)
    if whisper is None:
        return None
    rate, hop, _longest = whisper
    written = "<|audio_start|><|audio_pad|><|audio_end|>"
    # Versions differ by a frame where the last one is not whole.
    return AudioRule(rate, partial(_by_seconds, hop), None, written, "<|audio_pad|>", is_exact=False)


def _ultravox(config: dict[str, Any], extractor: dict[str, Any], _: dict[str, Any]) -> AudioRule | None:
    stack = _whole(config.get("stack_factor", 8))
    whisper = _whisper(extractor or {"sampling_rate": 16_000})
    if whisper is None or stack is None:
        return None
    rate, hop, chunk = whisper
    count = partial(_by_chunks, hop, chunk, 2 * stack)
    return AudioRule(rate, count, None, "<|audio|>", "<|audio|>", is_exact=False)


def _gemma3n(_: dict[str, Any], __: dict[str, Any], processor: dict[str, Any]) -> AudioRule | None:
    each = _whole(processor.get("audio_seq_length", 188))
    if each is None:
        return None
    # Around it come two marks and two empty lines, which may merge with their neighbours.
    count = partial(_always, each + 4)
    return AudioRule(16_000, count, 0, "<audio_soft_token>", "<audio_soft_token>", is_exact=False)


def _phi4(config: dict[str, Any], extractor: dict[str, Any], _: dict[str, Any]) -> AudioRule | None:
    layers = config.get("embd_layer")
    layer = layers.get("audio_embd_layer") if isinstance(layers, dict) else None
    squeeze = _whole(layer.get("compression_rate")) if isinstance(layer, dict) else None
    if squeeze is None or extractor.get("sampling_rate", 16_000) != 16_000:
        return None
    return AudioRule(16_000, partial(_by_windows, squeeze), None, "<|audio_{}|>", "<|audio_1|>")


def _granite(_: dict[str, Any], extractor: dict[str, Any], __: dict[str, Any]) -> AudioRule | None:
    mel = extractor.get("melspec_kwargs")
    mel = mel if isinstance(mel, dict) else extractor
    rate = _whole(mel.get("sample_rate", extractor.get("sampling_rate", 16_000)))
    hop = _whole(mel.get("hop_length", 160))
    window = _whole(extractor.get("projector_window_size", 15))
    down = _whole(extractor.get("projector_downsample_rate", 5))
    if rate is None or hop is None or window is None or down is None:
        return None
    return AudioRule(rate, partial(_by_blocks, hop, window, window // down), None, "<|audio|>", "<|audio|>")


_RULES: dict[str, Callable[[dict[str, Any], dict[str, Any], dict[str, Any]], AudioRule | None]] = {
    "qwen2_audio": _qwen2,
    "qwen2_5_omni": _qwen2,
    "qwen3_omni_moe": _qwen3,
    "ultravox": _ultravox,
    "gemma3n": _gemma3n,
    "phi4mm": _phi4,
    "granite_speech": _granite,
}


def _by_four(hop: int, most: int, samples: int) -> int:
    frames = min(_up(samples, hop), most)
    return max(0, (((frames - 1) // 2 + 1) - 2) // 2 + 1)


def _by_seconds(hop: int, samples: int) -> int:
    """Thirteen for every hundred frames; the rest is halved three times."""
    seconds, rest = divmod(_up(samples, hop), 100)
    for _ in range(3):
        rest = _up(rest, 2)
    return seconds * 13 + rest


def _by_chunks(hop: int, chunk: int, stride: int, samples: int) -> int:
    """One more for each chunk than its frames need: versions round differently."""
    whole, rest = divmod(samples, chunk)
    last = _up(_up(rest, hop), stride) + 1 if rest or not whole else 0
    return whole * (_up(_up(chunk, hop), stride) + 1) + last


def _always(each: int, _: int) -> int:
    return each


def _by_windows(squeeze: int, samples: int) -> int:
    return max(0, _up((samples - 400) // 160 + 1, squeeze))


def _by_blocks(hop: int, window: int, of_block: int, samples: int) -> int:
    return _up((samples // hop + 1) // 2, window) * of_block


def _up(value: int, by: int) -> int:
    return -(-value // by)


def _whisper(extractor: dict[str, Any]) -> tuple[int, int, int] | None:
    """Samples in a second, of one frame, and of the longest recording; where unset, transformers' own."""
    rate, hop = _whole(extractor.get("sampling_rate", 16_000)), _whole(extractor.get("hop_length", 160))
    seconds = _whole(extractor.get("chunk_length", 30))
    if not extractor or rate is None or hop is None or seconds is None:
        return None
    return rate, hop, seconds * rate


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
