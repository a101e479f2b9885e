"""Audio tokens follow the model's arithmetic, or are a bound that says so."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from test_recordings import part, plain, written
from tiny import write_model
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast, Qwen2AudioProcessor, WhisperFeatureExtractor
from transformers.models.gemma3n.feature_extraction_gemma3n import Gemma3nAudioFeatureExtractor
from transformers.models.gemma3n.processing_gemma3n import Gemma3nProcessor
from transformers.models.granite_speech.feature_extraction_granite_speech import GraniteSpeechFeatureExtractor

from kvgate.tokens import CannotCount, load
from kvgate.tokens.audio import AudioRule, AudioTokens, audio_rule, resampled
from kvgate.tokens.recordings import Clip
from kvgate.wire.dialects.chats import conversation_of

SEED = 11
WHISPER = {"sampling_rate": 16_000, "hop_length": 160, "chunk_length": 30}
PHI4 = {"model_type": "phi4mm", "embd_layer": {"audio_embd_layer": {"compression_rate": 8}}}
GRANITE = {"projector_window_size": 15, "projector_downsample_rate": 3, "melspec_kwargs": {"hop_length": 160}}
QWEN = {"model_type": "qwen2_audio"}
# The template of Qwen2-Audio's kind: it loops over parts.
PARTS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'audio' %}"
    "Audio {{ loop.index }}: <|audio_bos|><|AUDIO|><|audio_eos|>\n{% elif part.type == 'text' %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
MARKS = ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|audio|>", "<audio_soft_token>"]


def rule_of(config: dict[str, Any], extractor: dict[str, Any] | None = None) -> AudioRule:
    rule = audio_rule(config, WHISPER if extractor is None else extractor, {})
    assert rule is not None
    return rule


def exactly(rule: AudioRule, frames: int, rate: int = 16_000) -> AudioTokens:
    made = rule.tokens(Clip(frames, rate, True))
    assert made is not None
    return made


def directory(
    folder: Path, config: dict[str, Any], template: str = PARTS, extractor: dict[str, Any] | None = None
) -> Path:
    write_model(folder, template)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(WHISPER if extractor is None else extractor))
    return folder


def chat(*parts: dict[str, Any], text: str = "what do you hear") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]}


@pytest.mark.parametrize("seconds", [1, 2, 30])
@pytest.mark.parametrize("hop", [160, 200, 333])
def test_whispers_mask_is_counted_as_transformers_makes_it(
    seconds: int, hop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the mask counts; the spectrum is what takes the time.
    monkeypatch.setattr(WhisperFeatureExtractor, "_np_extract_fbank_features", lambda _, waves, __: waves)
    monkeypatch.setattr(WhisperFeatureExtractor, "_torch_extract_fbank_features", lambda _, waves, __: waves)
    settings = {"sampling_rate": 16_000, "hop_length": hop, "chunk_length": seconds}
    extractor = WhisperFeatureExtractor(**settings)
    rule = rule_of({"model_type": "qwen2_5_omni"}, settings)
    dice = random.Random(SEED)
    edges = [seconds * 16_000 + step for step in (-hop, -1, 0, 1, 5_000)]
    for samples in [
        1,
        hop,
        hop + 1,
        4 * hop,
        *edges,
        *(dice.randrange(1, seconds * 17_000) for _ in range(20)),
    ]:
        made = extractor(
            [numpy.zeros(samples)],
            sampling_rate=16_000,
            padding="max_length",
            return_attention_mask=True,
        )
        frames = int(made["attention_mask"].sum())
        truth = (((frames - 1) // 2 + 1) - 2) // 2 + 1
        assert exactly(rule, samples) == AudioTokens(max(0, truth), True)


def test_a_chat_of_qwen2_audio_counts_like_its_processor(tmp_path: Path) -> None:
    extractor = {**WHISPER, "chunk_length": 2}
    counter = load(directory(tmp_path, QWEN, extractor=extractor))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    processor = Qwen2AudioProcessor(WhisperFeatureExtractor(**extractor), tokenizer, chat_template=PARTS)
    dice = random.Random(SEED)
    for index in range(6):
        lengths = [dice.randrange(500, 40_000) for _ in range(1 + index % 3)]
        body = chat(*[part(plain(length)) for length in lengths])
        seen = [{"role": "user", "content": [{"type": "audio"} for _ in lengths]}]
        seen[0]["content"] += body["messages"][0]["content"][-1:]  # type: ignore[operator]
        text = tokenizer.apply_chat_template(seen, chat_template=PARTS, tokenize=False)
        truth = processor(text=[text], audio=[numpy.zeros(n) for n in lengths], sampling_rate=16_000)

        count = counter.count_chat(body, with_parts=True)
        assert count.is_exact
        assert count.prompt_tokens == len(truth["input_ids"][0])
        assert sum(one.tokens for one in count.parts) == count.prompt_tokens
        assert "audio" in {one.name for one in count.parts}


@pytest.mark.parametrize("window", [(15, 5), (15, 3)])
def test_granites_blocks_are_counted_as_transformers_does(window: tuple[int, int]) -> None:
    projector, down = window
    extractor = {**GRANITE, "projector_window_size": projector, "projector_downsample_rate": down}
    own = SimpleNamespace(
        melspec_kwargs={"hop_length": 160}, projector_window_size=projector, projector_downsample_rate=down
    )
    lengths = [1, 159, 160, *random.Random(SEED).sample(range(1_000_000), 500)]
    truths = GraniteSpeechFeatureExtractor._get_num_audio_features(own, lengths)
    rule = rule_of({"model_type": "granite_speech"}, extractor)

    assert [exactly(rule, samples).tokens for samples in lengths] == list(truths)


def test_gemma3n_makes_the_same_of_every_recording() -> None:
    # The marks and empty lines that its processor writes around them are four tokens more.
    names = ("audio_token", "boa_token", "eoa_token", "image_token", "boi_token", "eoi_token")
    marks: dict[str, Any] = {name: f"<{name}>" for name in names}
    tokenizer = SimpleNamespace(**marks, audio_token_id=1, image_token_id=2)
    processor = SimpleNamespace()
    # What it registers at last needs a whole processor.
    with contextlib.suppress(TypeError):
        Gemma3nProcessor.__init__(processor, None, None, tokenizer)  # type: ignore[arg-type]
    sequence = processor.full_audio_sequence
    each = sequence.count("<audio_token>")
    around = sequence.replace("<audio_token>", "")
    rule = audio_rule({"model_type": "gemma3n"}, {}, {})

    assert around == "\n\n<boa_token><eoa_token>\n\n"
    assert rule is not None
    assert rule.tokens(None) == rule.tokens(Clip(99, 8_000, True)) == AudioTokens(each + 4, False)
    assert Gemma3nAudioFeatureExtractor().sampling_rate == rule.rate


@pytest.mark.parametrize(
    ("config", "extractor", "samples", "tokens"),
    [
        (QWEN, WHISPER, 480_000, AudioTokens(750, True)),
        (QWEN, WHISPER, 9_000_000, AudioTokens(750, True)),
        (
            {"model_type": "qwen2_5_omni"},
            {**WHISPER, "chunk_length": 300},
            9_000_000,
            AudioTokens(7_500, True),
        ),
        ({"model_type": "qwen3_omni_moe"}, WHISPER, 160_000, AudioTokens(130, False)),
        ({"model_type": "ultravox", "stack_factor": 8}, WHISPER, 480_000, AudioTokens(189, False)),
        (PHI4, WHISPER, 16_000, AudioTokens(13, True)),
        (
            {"model_type": "granite_speech"},
            {**GRANITE, "projector_downsample_rate": 5},
            160_000,
            AudioTokens(102, True),
        ),
    ],
)
def test_the_rules_of_models(
    config: dict[str, Any], extractor: dict[str, Any], samples: int, tokens: AudioTokens
) -> None:
    assert exactly(rule_of(config, extractor), samples) == tokens


@pytest.mark.parametrize("config", [QWEN, {"model_type": "ultravox"}, {"model_type": "qwen3_omni_moe"}, PHI4])
def test_a_longer_recording_never_has_fewer_tokens(config: dict[str, Any]) -> None:
    rule = rule_of(config)
    counts = [exactly(rule, samples).tokens for samples in range(0, 1_000_000, 79)]

    assert counts == sorted(counts)


def test_an_unknown_length_is_the_most_where_the_model_cuts() -> None:
    assert rule_of(QWEN).tokens(None) == AudioTokens(750, False)
    assert rule_of(PHI4).tokens(None) is None
    assert rule_of(QWEN).tokens(Clip(16_000, 16_000, False)) == AudioTokens(25, False)


@pytest.mark.parametrize(
    ("config", "extractor"),
    [
        ({}, WHISPER),
        ({"model_type": "voxtral"}, WHISPER),
        (QWEN, {}),
        (QWEN, {**WHISPER, "hop_length": 0}),
        (QWEN, {**WHISPER, "chunk_length": "30"}),
        (QWEN, {**WHISPER, "sampling_rate": True}),
        ({"model_type": "phi4mm"}, WHISPER),
        ({"model_type": "phi4mm", "embd_layer": {"audio_embd_layer": "audio"}}, WHISPER),
        ({"model_type": "granite_speech"}, {"projector_window_size": -1}),
        ({"model_type": "ultravox", "stack_factor": None}, WHISPER),
    ],
)
def test_an_unknown_model_has_no_rule(config: dict[str, Any], extractor: dict[str, Any]) -> None:
    assert audio_rule(config, extractor, {}) is None


def test_the_settings_may_stand_in_the_processors_file() -> None:
    rule = audio_rule(QWEN, {}, {"feature_extractor": {**WHISPER, "chunk_length": 10}})

    assert rule is not None
    assert rule.longest == 160_000


def test_resamplers_round_up_or_in_single_precision() -> None:
    assert resampled(100, 16_000, 16_000) == {100}
    assert resampled(44_100, 44_100, 16_000) == {16_000}
    assert resampled(44_101, 44_100, 16_000) == {16_001}
    # 20,000,001 is not a number in single precision.
    assert resampled(40_000_001, 32_000, 16_000) == {20_000_001, 20_000_000}


def test_a_difference_of_resamplers_is_a_bound() -> None:
    rule = AudioRule(16_000, lambda samples: samples, None, "", "")

    assert rule.tokens(Clip(40_000_001, 32_000, True)) == AudioTokens(20_000_001, False)


@pytest.mark.parametrize(
    ("config", "extractor", "mark"),
    [
        (QWEN, WHISPER, "Audio {}: <|audio_bos|><|AUDIO|><|audio_eos|>"),
        ({"model_type": "granite_speech"}, GRANITE, "<|audio|>"),
        (PHI4, WHISPER, "<|audio_{}|>"),
    ],
)
def test_a_template_of_text_gets_the_placeholders_before_the_message(
    config: dict[str, Any], extractor: dict[str, Any], mark: str, tmp_path: Path
) -> None:
    text = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
    counter = load(directory(tmp_path, config, text, extractor))
    marks = [mark.format(1), mark.format(2)]
    one, two = part(plain(50_000)), part(written(70_000, 44_100, 2, "FLAC", "PCM_16", SEED), "flac")
    rule = rule_of(config, extractor)
    each = [exactly(rule, 50_000), exactly(rule, 70_000, 44_100)]
    prompt = f"<|im_start|>{marks[0]}\n{marks[1]}\nhello<|im_end|>"
    known = mark != "<|audio_{}|>"

    count = counter.count_chat(chat(one, two, text="hello"))
    alone = counter.count_text(prompt, add_special=False).prompt_tokens
    assert count.prompt_tokens == alone + sum(made.tokens - known for made in each)
    assert count.is_exact == known
    # What the client has written out is not written again.
    own = counter.count_chat(chat(one, two, text=f"hello {marks[0]} {marks[1]}"))
    again = counter.count_text(f"<|im_start|>hello {marks[0]} {marks[1]}<|im_end|>", add_special=False)
    assert own.prompt_tokens == again.prompt_tokens + sum(made.tokens - known for made in each)


def test_a_recording_of_unknown_length_is_a_bound_or_left_to_the_engine(tmp_path: Path) -> None:
    far = {"type": "audio_url", "audio_url": {"url": "https://example.org/a.mp3"}}
    cutting = load(directory(tmp_path, QWEN))
    longest = cutting.count_chat(chat(part(plain(480_000))))
    count = cutting.count_chat(chat(far))

    assert (count.prompt_tokens, count.is_exact, count.source) == (longest.prompt_tokens, False, "bound")
    endless = load(directory(tmp_path, {"model_type": "granite_speech"}, extractor=GRANITE))
    with pytest.raises(CannotCount, match="send WAV or FLAC"):
        endless.count_chat(chat(far))


def test_a_model_without_a_rule_leaves_recordings_to_the_engine(tmp_path: Path) -> None:
    counter = load(directory(tmp_path, {"model_type": "llama"}))

    with pytest.raises(CannotCount, match=r"config\.json"):
        counter.count_chat(chat(part(plain(100))))


@pytest.mark.parametrize("name", ["mm_processor_kwargs", "media_io_kwargs"])
def test_settings_of_the_request_that_change_media_are_left_to_the_engine(name: str, tmp_path: Path) -> None:
    counter = load(directory(tmp_path, QWEN))
    body = chat(part(plain(100)))

    with pytest.raises(CannotCount, match=name):
        counter.count_chat({**body, name: {"truncation": False}})
    assert counter.count_chat({**body, name: {}}).is_exact
    # The gateway hands them to the counter.
    assert conversation_of(body["messages"], {name: {"truncation": False}}).options == {
        name: {"truncation": False}
    }


@pytest.mark.parametrize("field", ["image_url", "video_url", "audio_embeds"])
def test_a_part_with_an_id_is_what_its_fields_say(field: str, tmp_path: Path) -> None:
    counter = load(directory(tmp_path, QWEN))
    hidden = {"type": "text", "text": "hi", "uuid": "a", field: {"url": "https://example.org/a"}}

    with pytest.raises(CannotCount):
        counter.count_chat(chat(hidden))


def test_no_bound_of_the_text_is_given_for_a_chat_with_media(tmp_path: Path) -> None:
    counter = load(directory(tmp_path, QWEN))

    with pytest.raises(CannotCount, match="media"):
        counter.proofs.written(chat(part(plain(100))))
    assert "what do you hear" in counter.proofs.written(chat())
