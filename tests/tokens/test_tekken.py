"""A directory with only tekken.json counts texts as mistral-common does."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from converted import TEKKEN, directory, texts
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from kvgate.tokens import BadTokenizer, PromptCounter, load
from kvgate.tokens.loader import ModelFiles, load_files

SEED = 9


def small(**config: Any) -> dict[str, Any]:
    """The content of a tekken.json with the bytes and one token more, which is beyond its vocabulary."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"ab"]
    return {
        "config": {
            "pattern": r"\w+|\W",
            "default_vocab_size": 266,
            "default_num_special_tokens": 10,
            "version": "v3",
            **config,
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
        "special_tokens": [{"rank": 0, "token_str": "<marker>", "is_control": True}],
    }


def written(folder: Path, content: Any) -> Path:
    (folder / "tekken.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return load_files(directory(tmp_path_factory.mktemp("tekken"), TEKKEN, "tekken.json"))


def test_every_text_has_mistral_commons_tokens(files: ModelFiles) -> None:
    theirs = Tekkenizer.from_file(TEKKEN)
    for text in texts(SEED, 1_000):
        ids = [number - theirs.num_special_tokens for number in theirs.encode(text, bos=False, eos=False)]
        assert files.reference.encode(text, add_special_tokens=False).ids == ids, repr(text)
        assert len(files.reference.encode(text)) == len(theirs.encode(text, bos=True, eos=False))


def test_an_accelerator_agrees(files: ModelFiles) -> None:
    fast, slow = PromptCounter(files), PromptCounter(files, accelerators=())
    assert fast.counted_by == "quicktok"
    for text in texts(SEED + 1):
        assert fast.count_text(text) == slow.count_text(text)


def test_a_hostile_text_takes_time_in_proportion(files: ModelFiles) -> None:
    counter = PromptCounter(files)
    for unit in ("a", " ", "\n", "中", "!", "e\u0301", "aB", "\u0301"):
        assert counter.count_text(unit * (300_000 // len(unit))).prompt_tokens > 1_000


def test_only_as_many_tokens_as_the_model_uses_are_known(tmp_path: Path) -> None:
    reference = load_files(written(tmp_path, small())).reference
    assert len(reference.encode("abab", add_special_tokens=False)) == 4
    reference = load_files(written(tmp_path, small(default_vocab_size=267))).reference
    assert len(reference.encode("abab", add_special_tokens=False)) == 2


def test_its_special_tokens_are_letters_in_a_text_and_known_by_name(tmp_path: Path) -> None:
    files = load_files(written(tmp_path, small()))
    assert len(files.reference.encode("<marker>", add_special_tokens=False)) == len("<marker>")
    assert files.specials.are_in("a <marker>")
    assert not files.specials.are_in("a marker")


def test_a_file_that_mistral_common_cannot_load_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadTokenizer, match=r"mistral-common cannot load .*tekken\.json"):
        load(written(tmp_path, small()))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "Expecting value"),
        ("[" * 100_000, "recursion"),
        ("[]", "TypeError"),
        ("{}", "KeyError"),
        (small(pattern="((("), "Oniguruma"),
        (small(default_vocab_size=10**9), "257 tokens where"),
        (small(default_vocab_size="x"), "TypeError"),
        (small(default_vocab_size=20), "257 tokens where 10"),
        ({**small(), "vocab": small()["vocab"][::-1]}, "not in order"),
        ({**small(), "vocab": [small()["vocab"][0]] * 257}, "not in order"),
        ({**small(), "special_tokens": [5]}, "TypeError"),
    ],
)
def test_a_damaged_file_is_told_in_one_line(content: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(BadTokenizer, match=why) as raised:
        load_files(written(tmp_path, content))
    assert str(tmp_path / "tekken.json") in str(raised.value)
    assert "\n" not in str(raised.value)
