"""A recording's length is what a decoder makes of it, or a bound from above, or not known."""

from __future__ import annotations

import base64
import io
import random
import struct
import time
from typing import Any

import numpy
import pytest
import soundfile

from kvgate.tokens.recordings import Base64Bytes, Clip, Looks, clip_of

SEED = 7
SUBTYPES = ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW")
RATES = (8_000, 11_025, 16_000, 22_050, 44_100, 48_000, 96_000)


def part(raw: bytes | str, kind: str = "wav") -> dict[str, Any]:
    data = raw if isinstance(raw, str) else base64.b64encode(raw).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": kind}}


def url(raw: bytes) -> dict[str, Any]:
    address = f"data:audio/wav;base64,{base64.b64encode(raw).decode()}"
    return {"type": "audio_url", "audio_url": {"url": address}}


def chunk(name: bytes, body: bytes, size: int | None = None) -> bytes:
    return name + struct.pack("<I", len(body) if size is None else size) + body + b"\0" * (len(body) % 2)


def wav_format(kind: int = 1, channels: int = 1, rate: int = 16_000, bits: int = 16) -> bytes:
    width = channels * bits // 8
    return struct.pack("<HHIIHH", kind, channels, rate, rate * width, width, bits)


def wav(*chunks: bytes) -> bytes:
    body = b"WAVE" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def plain(frames: int, rate: int = 16_000) -> bytes:
    return wav(chunk(b"fmt ", wav_format(rate=rate)), chunk(b"data", b"\0\0" * frames))


def written(frames: int, rate: int, channels: int, container: str, subtype: str, seed: int) -> bytes:
    noise = numpy.random.default_rng(seed).uniform(-0.5, 0.5, (frames, channels))
    sound = io.BytesIO()
    soundfile.write(sound, noise, rate, format=container, subtype=subtype)
    return sound.getvalue()


@pytest.mark.parametrize("container", ["WAV", "WAVEX"])
@pytest.mark.parametrize("subtype", SUBTYPES)
def test_a_wav_is_as_long_as_a_decoder_makes_it(container: str, subtype: str) -> None:
    dice = random.Random(f"{SEED}{container}{subtype}")
    for _ in range(6):
        frames, rate, channels = dice.randrange(1, 30_000), dice.choice(RATES), dice.randrange(1, 4)
        raw = written(frames, rate, channels, container, subtype, dice.randrange(1 << 30))
        decoded, true_rate = soundfile.read(io.BytesIO(raw))

        for one in (part(raw), url(raw)):
            assert clip_of(one) == Clip(len(decoded), true_rate, True)


@pytest.mark.parametrize("subtype", ["PCM_S8", "PCM_16", "PCM_24"])
def test_a_flac_is_as_long_as_the_frames_that_it_has(subtype: str) -> None:
    dice = random.Random(f"{SEED}{subtype}")
    exact = 0
    for _ in range(12):
        frames, rate = dice.randrange(1, 60_000), dice.choice(RATES)
        raw = written(frames, rate, dice.randrange(1, 3), "FLAC", subtype, dice.randrange(1 << 30))
        clip = clip_of(part(raw, "flac"))

        assert clip is not None
        assert clip.rate == rate
        assert clip.frames == frames if clip.is_exact else clip.frames > frames
        exact += clip.is_exact
    assert exact >= 9  # bytes that look like a frame are rare


@pytest.mark.parametrize("claimed", [1, 0, (1 << 36) - 1])
def test_what_a_flac_claims_is_not_believed(claimed: int) -> None:
    raw = bytearray(written(50_000, 16_000, 1, "FLAC", "PCM_16", SEED))
    facts = int.from_bytes(raw[18:26], "big") >> 36 << 36 | claimed
    raw[18:26] = facts.to_bytes(8, "big")
    clip = clip_of(part(bytes(raw), "flac"))

    assert clip is not None
    assert clip.frames >= 50_000
    assert not clip.is_exact


def test_a_flac_whose_frames_have_another_rate_is_not_measured() -> None:
    raw = bytearray(written(5_000, 16_000, 1, "FLAC", "PCM_16", SEED))
    facts = int.from_bytes(raw[18:26], "big") & ((1 << 44) - 1) | 8_000 << 44
    raw[18:26] = facts.to_bytes(8, "big")

    assert clip_of(part(bytes(raw), "flac")) is None


@pytest.mark.parametrize("claimed", [0, 5, 0x7FFFFFFE, 0xFFFFFFFF])
def test_a_wav_is_measured_by_the_bytes_that_are_there(claimed: int) -> None:
    raw = wav(chunk(b"fmt ", wav_format()), chunk(b"data", b"\0\0" * 1_000, claimed))
    clip = clip_of(part(raw))

    if claimed == 5:
        # What stands behind is neither sound nor a chunk that is known.
        assert clip is None
    else:
        assert clip == Clip(1_000, 16_000, False)


@pytest.mark.parametrize(
    "raw",
    [
        wav(chunk(b"fmt ", wav_format()), chunk(b"data", b"\0" * 40), chunk(b"data", b"\0" * 4_000)),
        wav(chunk(b"fmt ", wav_format()), chunk(b"fmt ", wav_format()), chunk(b"data", b"\0" * 40)),
        wav(chunk(b"data", b"\0" * 40), chunk(b"fmt ", wav_format())),
        wav(chunk(b"fmt ", wav_format()), chunk(b"SMV0", b"\0" * 40), chunk(b"data", b"\0" * 40)),
        wav(chunk(b"fmt ", wav_format(kind=0x55)), chunk(b"data", b"\0" * 40)),
        wav(chunk(b"fmt ", wav_format(kind=2, bits=4)), chunk(b"data", b"\0" * 40)),
        wav(chunk(b"fmt ", wav_format(rate=0)), chunk(b"data", b"\0" * 40)),
        wav(chunk(b"fmt ", wav_format(channels=0)), chunk(b"data", b"\0" * 40)),
        wav(chunk(b"fmt ", wav_format()[:12] + b"\x09\0\x10\0"), chunk(b"data", b"\0" * 40)),
        wav(chunk(b"fmt ", wav_format()[:10]), chunk(b"data", b"\0" * 40)),
        wav(chunk(b"fmt ", wav_format())),
        wav(*[chunk(b"LIST", b"")] * 100, chunk(b"fmt ", wav_format()), chunk(b"data", b"\0" * 40)),
        plain(1_000)[:30],
        b"RF64" + plain(10)[4:],
        b"ID3\x04" + b"\xff\xfb\x90\0" * 100,
        b"OggS" + b"\0" * 100,
        b"fLaC",
        b"fLaC\x80\0\0\x22" + b"\0" * 40,
        b"fLaC" + b"\0\0\0\x22" + b"\0" * 34 + b"\4\0\0\0" * 100,
        b"",
        b"RI",
    ],
)
def test_what_decoders_may_read_in_another_way_is_not_measured(raw: bytes) -> None:
    assert clip_of(part(raw)) is None


def test_metadata_around_the_sound_is_passed_over() -> None:
    sound = chunk(b"data", b"\0\0" * 77)
    raw = wav(chunk(b"LIST", b"abc"), chunk(b"fmt ", wav_format()), sound, chunk(b"id3 ", b"x" * 31))

    assert clip_of(part(raw)) == Clip(77, 16_000, True)


GOOD = base64.b64encode(plain(100)).decode()


@pytest.mark.parametrize(
    "broken",
    [
        part(GOOD[:-1]),
        part("!" + GOOD[1:]),
        part("A" * 3),
        part("===="),
        part(GOOD[:40] + "\n\n\n\n" + GOOD[40:]),
        part(GOOD, "wav;base64,AAAA"),
        {"type": "input_audio", "input_audio": {"data": 5, "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": GOOD, "format": 5}},
        {"type": "input_audio", "input_audio": None},
        {"type": "input_audio"},
        {"type": "audio_url", "audio_url": {"url": "https://example.org/a.wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav,{GOOD}"}},
        {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64"}},
        {"type": "audio_url", "audio_url": 5},
        {**part(GOOD), "audio_url": {"url": f"data:audio/wav;base64,{GOOD}"}},
        {**part(GOOD), "uuid": "one"},
    ],
)
def test_a_length_that_is_not_to_be_seen_is_not_guessed(broken: dict[str, Any]) -> None:
    assert clip_of(broken) is None


def test_stretches_of_base64_are_the_bytes_that_all_of_it_has() -> None:
    dice = random.Random(SEED)
    for size in range(60):
        raw = dice.randbytes(size)
        data = Base64Bytes(base64.b64encode(raw).decode())
        assert data.size == size
        for _ in range(10):
            begin, end = sorted((dice.randrange(size + 5), dice.randrange(size + 5)))
            assert data.at(begin, end) == raw[begin:end]


@pytest.mark.parametrize(
    "raw",
    [
        plain(25_000_000),
        plain(10)[:44] + chunk(b"LIST", b"") * 5_000_000,
        b"fLaC\x80\0\0\x22" + b"\x10" * 34 + b"\xff\xf8" * 20_000_000,
        b"fLaC\x80\0\0\x22" + b"\x10" * 34 + b"\xff" * 40_000_000,
        b"fLaC\x80\0\0\x22" + b"\x10" * 34 + b"\xff\xf8\x19\0\0\0" * 6_000_000,
    ],
)
def test_fifty_megabytes_are_looked_through_in_a_moment(raw: bytes) -> None:
    big = part(raw)
    began = time.process_time()
    clip_of(big)

    assert time.process_time() - began < 2


def test_letters_that_some_decoders_leave_out_hide_no_sound() -> None:
    """Without them, the bytes that we would pass over end thirty bytes later, just before more sound."""
    head = wav(chunk(b"fmt ", wav_format()))
    hidden = chunk(b"data", b"\0\0" * 10_000)
    ours = chunk(b"data", b"\0\0") + b"JUNK" + struct.pack("<I", 12 + len(hidden)) + b"\0" * 12
    raw = head + chunk(b"LIST", b"\0" * 60 + ours) + hidden
    encoded = base64.b64encode(raw).decode()
    broken = encoded[:60] + "!" * 40 + encoded[60:]
    decoded, _ = soundfile.read(io.BytesIO(base64.b64decode(broken)))

    assert len(decoded) == 10_000
    assert clip_of(part(broken)) is None
    assert clip_of(part(encoded)) == Clip(10_000, 16_000, True)


def test_all_recordings_of_a_request_are_looked_through_in_a_moment() -> None:
    marks = b"fLaC\x80\0\0\x22" + b"\x10" * 34 + b"\xff\xf8\x19\0\0\0" * 25_000
    one, looks = part(marks, "flac"), Looks()
    began = time.process_time()
    clips = [clip_of(one, looks) for _ in range(200)]

    assert clips[0] is not None
    assert clips[1:] == [None] * 199
    assert time.process_time() - began < 1
