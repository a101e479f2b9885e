"""What the length of a text proves about its tokens is never wrong, whatever the text is."""

from __future__ import annotations

import string
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import write_model
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from kvgate.tokens import PromptCounter
from kvgate.tokens.bounds import Words, words_of
from kvgate.tokens.loader import load_files

WORD = string.ascii_letters + string.digits
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            ["the quick brown fox ", "e\u0301", "\u0301", "\u212a", "<|strip|>", "   \n", "Hello1"]
        ),
        st.text(),
    ),
    max_size=10,
).map("".join)


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> PromptCounter:
    return PromptCounter(load_files(write_model(tmp_path_factory.mktemp("model"))), accelerators=())


def with_a_token_that_takes_the_blanks(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(write_model(folder) / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<|strip|>", lstrip=True, rstrip=True)])
    return tokenizer


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Tokenizer, int]]:
    """With the growth of each one's normalizer."""
    stripping = with_a_token_that_takes_the_blanks(tmp_path_factory.mktemp("stripping"))
    plain = Tokenizer.from_str(stripping.to_str())
    plain.normalizer = normalizers.Sequence([])
    marked = Tokenizer.from_str(stripping.to_str())
    marked.normalizer = normalizers.Replace(" ", "▁")
    return [(stripping, 3), (plain, 1), (marked, 1)]


SHARED: list[tuple[Tokenizer, Words]] = []


@pytest.fixture(scope="module", autouse=True)
def _share(references: list[tuple[Tokenizer, int]]) -> None:
    for reference, growth in references:
        words = words_of(reference, growth)
        assert words is not None
        SHARED.append((reference, words))


@settings(deadline=None, max_examples=300)
@given(TEXTS, st.integers(1, 50))
@example("e\u0301" * 20, 50)
@example(" " * 5_000 + "<|strip|>" + "\n" * 5_000, 1_000)
def test_no_text_has_fewer_tokens_than_are_proven(text: str, enough: int) -> None:
    for reference, words in SHARED:
        try:
            tokens = len(reference.encode(text, add_special_tokens=False).ids)
        except (UnicodeError, TypeError):
            continue  # half of a surrogate pair
        assert words.least(text, enough) <= tokens


@settings(deadline=None, max_examples=100)
@given(st.text(st.sampled_from("ab1 é\u0301"), min_size=1), st.integers(1, 9), st.integers(1, 9))
def test_where_the_look_stops_makes_no_difference_to_the_truth(text: str, enough: int, stretch: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvgate.tokens.bounds._STRETCH", stretch)
        for reference, words in SHARED:
            assert words.least(text, enough) <= len(reference.encode(text, add_special_tokens=False).ids)


def test_an_english_text_is_known_to_have_many(counter: PromptCounter) -> None:
    words = counter.proofs.words
    assert words is not None
    text = "the lazy dog " * 10_000
    tokens = counter.count_text(text).prompt_tokens

    assert tokens / 12 < words.least(text, 1_000_000) <= tokens
    assert words.in_token == max(
        sum(character in WORD for character in token) for token in counter._files.reference.get_vocab()
    )


def test_no_more_is_looked_at_than_is_needed(counter: PromptCounter) -> None:
    words = counter.proofs.words
    assert words is not None
    text = "the lazy dog " * 4_000_000

    began = time.process_time()
    least = words.least(text, 1_000)
    taken = time.process_time() - began

    assert least >= 1_000
    assert taken < 0.02  # 52 MB would take 50 ms


def test_blanks_and_marks_prove_nothing(counter: PromptCounter) -> None:
    words = counter.proofs.words
    assert words is not None
    for text in ("", " " * 10_000, "e\u0301" * 10_000, "漢字" * 10_000, "\ud800" + "a" * 100):
        assert words.least(text, 100) == 0


def small(**changes: object) -> Tokenizer:
    """A byte-level tokenizer of single letters."""
    alphabet = {character: number for number, character in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def test_a_mark_behind_what_was_looked_at_may_take_a_letter_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = small(normalizer=normalizers.NFC())
    vocabulary = tokenizer.get_vocab() | {"Ã©": 256, "aÃ©": 257}
    tokenizer.model = models.BPE(vocab=vocabulary, merges=[("Ã", "©"), ("a", "Ã©")])
    words = words_of(tokenizer, 3)
    assert words == Words(1, composes=True)
    monkeypatch.setattr("kvgate.tokens.bounds._STRETCH", 2)

    assert len(tokenizer.encode("ae\u0301")) == 1
    assert words.least("ae\u0301", 2) <= 1
    assert words.least("ae", 2) == 2


def test_a_tokenizer_that_may_drop_letters_proves_nothing() -> None:
    assert words_of(small(), 1) == Words(1, composes=False)
    dropping = pre_tokenizers.Split(Regex("[a-z]+"), "removed")
    lacking = models.BPE(vocab={"a": 0, "b": 1}, merges=[])
    whole = models.WordLevel(
        vocab={character: n for n, character in enumerate(WORD)} | {"?": 99}, unk_token="?"
    )
    for changes in (
        {"pre_tokenizer": dropping},
        {"pre_tokenizer": pre_tokenizers.Sequence([dropping, pre_tokenizers.ByteLevel()])},
        {"pre_tokenizer": pre_tokenizers.CharDelimiterSplit("a")},
        {"model": lacking},
        {"model": whole},
    ):
        assert words_of(small(**changes), 1) is None, changes


def saved(folder: Path, tokenizer: Tokenizer) -> PromptCounter:
    tokenizer.save(str(write_model(folder) / "tokenizer.json"))
    return PromptCounter(load_files(folder), accelerators=())


def falling_back_to_bytes(added: str) -> Tokenizer:
    """With a mark put before what stands between two added tokens."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_tokens([AddedToken(added, normalized=False)])
    return tokenizer


def test_what_is_put_before_each_piece_counts_in_the_bound(tmp_path: Path) -> None:
    spaced = small(
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=True)]
        )
    )
    before = small(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True))
    for number, (tokenizer, text, is_bounded) in enumerate(
        [
            (falling_back_to_bytes("\n"), "\n\x01" * 100, False),
            (falling_back_to_bytes("<s>"), "<s>\x01" * 100, True),
            (spaced, "1" * 100, False),
            (before, "1" * 100, True),
        ]
    ):
        (tmp_path / str(number)).mkdir()
        counter = saved(tmp_path / str(number), tokenizer)
        most, tokens = counter.proofs.most(text), counter.count_text(text).prompt_tokens
        if is_bounded:
            assert most is not None
            assert most >= tokens
        else:
            assert tokens > len(text) * 1.4
            assert most is None
