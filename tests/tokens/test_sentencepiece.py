"""A directory with a SentencePiece model counts as transformers makes of it, and as the library does."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from converted import DATA, LLAMA, NATIVE, directory, texts, trained
from traffic import requests

from kvgate.tokens import BadTokenizer, PromptCounter, load
from kvgate.tokens.loader import load_files
from kvgate.tokens.messages import template_messages, template_tools

SEED = 5


def token(content: str, **more: Any) -> dict[str, Any]:
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {"content": content, **flags, **more}


NAMES = {
    "bos_token": "<s>",
    "eos_token": {"__type": "AddedToken", **token("</s>")},
    "unk_token": "<unk>",
}
USUAL = {str(number): token(name) for number, name in enumerate(("<unk>", "<s>", "</s>"))}
FULL = {**NAMES, "add_bos_token": True, "add_eos_token": False, "added_tokens_decoder": USUAL}
MORE = {
    **FULL,
    "add_eos_token": True,
    "added_tokens_decoder": {
        **USUAL,
        "32000": token("[NEW]", lstrip=True, rstrip=True),
        "32001": token("naïve", special=False, normalized=True),
        "32002": token("return", special=False, single_word=True),
    },
}
LLAMA_CLASS = {"tokenizer_class": "LlamaTokenizer"}
CASES: dict[str, tuple[dict[str, Any] | None, str | None]] = {
    "Llama, legacy": ({**FULL, **LLAMA_CLASS, "legacy": True}, None),
    "Llama, not legacy": ({**FULL, "tokenizer_class": "LlamaTokenizerFast", "legacy": False}, "llama"),
    "Llama, more tokens": ({**MORE, **LLAMA_CLASS}, None),
    "Llama, more tokens, legacy": ({**MORE, **LLAMA_CLASS, "legacy": True}, None),
    "Llama's class on Mistral": ({**FULL, **LLAMA_CLASS}, "mistral"),
    "Llama's class on Phi 3": ({**MORE, **LLAMA_CLASS, "legacy": False}, "phi3"),
    "no class": (MORE, None),
    "the fast class of all": ({**FULL, "tokenizer_class": "PreTrainedTokenizerFast"}, "mixtral"),
    "nothing else": (None, None),
}
TRAINED = [
    (kind, rules, case)
    for kind in ("bpe", "unigram")
    for rules in ("identity", "nmt_nfkc")
    for case in ("Llama, not legacy", "no class")
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }} {{ eos_token }}"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
)


def oracle(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def assert_equal(folder: Path, samples: list[str]) -> None:
    theirs, ours = oracle(folder), load_files(folder).reference
    for text in samples:
        assert len(ours.encode(text)) == len(theirs(text)["input_ids"]), repr(text)


@pytest.mark.parametrize("case", CASES)
def test_a_text_counts_as_with_the_tokenizer_that_transformers_makes(case: str, tmp_path: Path) -> None:
    config, model_type = CASES[case]
    assert_equal(directory(tmp_path, LLAMA, config=config, model_type=model_type), texts(SEED))


@pytest.mark.parametrize("case", ["Llama, legacy", "Llama's class on Mistral", "nothing else"])
def test_control_and_user_defined_pieces_count_likewise(case: str, tmp_path: Path) -> None:
    config, model_type = CASES[case]
    source, _ = NATIVE["v3"]
    samples = [*texts(SEED), "[REFERENCE_DOC_3]x [REFERENCE_DOC_0]<0x0A>[REFERENCE_DOC_1]", "[INST]a[/INST]"]
    assert_equal(directory(tmp_path, source, config=config, model_type=model_type), samples)


@pytest.mark.parametrize(("kind", "rules", "case"), TRAINED)
def test_models_that_normalize_or_are_unigram_count_likewise(
    kind: str, rules: str, case: str, tmp_path: Path
) -> None:
    config, model_type = CASES[case]
    samples = [*texts(SEED), "a<tool>b <ctl> \n\n\n <tool><tool>", "  ﬁ  ½ e\u0301  "]
    source = trained(tmp_path, kind, rules)
    assert_equal(directory(tmp_path, source, config=config, model_type=model_type), samples)


def test_t5_counts_likewise(tmp_path: Path) -> None:
    config = {"tokenizer_class": "T5Tokenizer", "eos_token": "</s>", "unk_token": "<unk>"}
    source = trained(tmp_path, "unigram", "nmt_nfkc")
    folder = directory(tmp_path, source, "spiece.model", config)
    assert_equal(folder, [*texts(SEED), "a <extra_id_0> b<extra_id_99>"])


@pytest.mark.parametrize("case", ["Llama, legacy", "Llama, not legacy", "Llama's class on Mistral"])
def test_chats_count_like_transformers_with_the_configs_template(case: str, tmp_path: Path) -> None:
    config, model_type = CASES[case]
    folder = directory(
        tmp_path, LLAMA, config={**(config or {}), "chat_template": TEMPLATE}, model_type=model_type
    )
    tokenizer, counter = oracle(folder), load(folder)
    for number, body in enumerate(requests(SEED, 15, ["<s>", "</s>", "[INST]"], False)):
        if body.get("continue_final_message"):
            continue
        truth = tokenizer.apply_chat_template(
            copy.deepcopy(template_messages(body["messages"], False).messages),
            tools=template_tools(body),
            add_generation_prompt=body.get("add_generation_prompt", True),
            return_dict=False,
        )
        assert counter.count_chat(body).prompt_tokens == len(truth), number
    assert counter.rendered_by is None
    # Each chunk between special tokens has its own leading space only in the older ways.
    assert bool(counter.separators) == (case != "Llama, not legacy")


@pytest.mark.parametrize("version", ["v1", "v2", "v3", "v7"])
def test_mistrals_own_files_count_as_the_library_does(version: str, tmp_path: Path) -> None:
    source, name = NATIVE[version]
    library = sentencepiece.SentencePieceProcessor(model_file=str(source))
    files = load_files(directory(tmp_path, source, name))
    alone = "[REFERENCE_DOC_0]{0}[REFERENCE_DOC_1]".format
    lone = [alone(inner) for inner in ("<0x0A>", "</s>", "<unk>", "[INST]", "[control_9]", " ▁ ", "")]
    for text in [*texts(SEED), *lone, "".join(lone)]:
        assert files.reference.encode(text, add_special_tokens=False).ids == library.encode(text), repr(text)
    assert len(files.reference.encode("")) == 1  # BOS, as vLLM puts it before a completion's prompt
    assert files.specials.are_in("a </s>")


def test_an_accelerator_that_agrees_is_used_for_a_converted_tokenizer(tmp_path: Path) -> None:
    folder = directory(tmp_path, LLAMA, config=FULL)
    fast, slow = load(folder), PromptCounter(load_files(folder), accelerators=())
    assert fast.counted_by != "tokenizers"
    assert fast.directory == folder
    for text in texts(SEED + 1):
        assert fast.count_text(text) == slow.count_text(text)
        most = slow.proofs.most(text)
        assert most is not None
        assert slow.count_text(text).prompt_tokens <= most


def test_added_tokens_of_an_old_directory_are_read(tmp_path: Path) -> None:
    folder = directory(tmp_path, LLAMA, config={**NAMES, **LLAMA_CLASS})
    (folder / "added_tokens.json").write_text('{"<|marker|>": 32000}')
    assert_equal(folder, ["a <|marker|>", "<|marker|><|marker|>", "x<|marker|> y", "<|marker"])


def test_a_config_that_is_silent_on_bos_makes_a_bound(tmp_path: Path) -> None:
    count = load(directory(tmp_path, LLAMA, config={**NAMES, **LLAMA_CLASS})).count_text("the")
    assert (count.prompt_tokens, count.is_exact) == (2, False)


def test_a_class_with_rules_of_its_own_is_refused_with_the_command_that_converts(tmp_path: Path) -> None:
    folder = directory(tmp_path, LLAMA, config={"tokenizer_class": "BaichuanTokenizer"})
    with pytest.raises(BadTokenizer, match=r"class BaichuanTokenizer .*tokenizer\.model: python -c"):
        load_files(folder)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no pieces"),
        (b"IQ== 0\nIg== 1\n", "not a SentencePiece model"),
        (LLAMA.read_bytes()[:5000], "ends within"),
        (LLAMA.read_bytes()[:-3], "ends within"),
        (b"\x0a\x03\x0a\x01a" * 2, "twice"),
        (b"\x0a\x03\x0a\x01a\x12\x02\x18\x03", "type 3"),
        (b"\x0a\x03\x0a\x01a\x12\x03\xc0\x02\x09", "unknown piece 9"),
        (b"\x0a\x03\x0a\x01\xff", "utf-8"),
        (b"\x0a\x0a\x0a\x01a\x15\x00\x00\xc0\x7f\x18\x01", "no score"),
        (b"\xff" * 11, "without end"),
    ],
)
def test_a_damaged_file_is_told_in_one_line(content: bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(BadTokenizer, match=why) as raised:
        load_files(tmp_path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_damaged_normalization_is_told(tmp_path: Path) -> None:
    good = trained(tmp_path, "unigram", "nmt_nfkc").read_bytes()
    # Behind the name and three bytes of length: the size of the table.
    at = good.index(b"nmt_nfkc\x12") + len(b"nmt_nfkc\x12") + 3
    (tmp_path / "tokenizer.model").write_bytes(good[:at] + b"\xff\xff\xff\x7f" + good[at + 4 :])
    with pytest.raises(BadTokenizer, match="cannot be used"):
        load_files(tmp_path)


def test_the_template_of_another_file_is_used(tmp_path: Path) -> None:
    folder = directory(tmp_path, DATA / "tokenizer.model.v1", config={**FULL, **LLAMA_CLASS})
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ bos_token }}one"}))
    assert load(folder).count_chat({"messages": [{"role": "user", "content": "x"}]}).prompt_tokens == 2
