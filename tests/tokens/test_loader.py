"""A model's directory is read as the engines read it, and what is wrong with it is told with the fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import write_model
from tokenizers import Tokenizer

from kvgate.tokens import BadTokenizer
from kvgate.tokens.loader import load_files

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def rendered(folder: Path) -> str:
    template = load_files(folder).template
    assert template is not None
    return template.render(CHAT).text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", "from a file"),
        ("chat_template.json", json.dumps({"chat_template": "from a file"})),
    ],
)
def test_a_template_in_a_file_wins_over_the_configs(tmp_path: Path, name: str, content: str) -> None:
    write_model(tmp_path, template="from the config")
    assert rendered(tmp_path) == "from the config"

    (tmp_path / name).write_text(content)

    assert rendered(tmp_path) == "from a file"


def test_named_templates_are_read_from_config_and_folder(tmp_path: Path) -> None:
    write_model(tmp_path, template=None, config={"chat_template": [{"name": "default", "template": "plain"}]})
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("for tools")
    template = load_files(tmp_path).template
    assert template is not None

    tool = {"type": "function", "function": {"name": "f"}}
    assert template.render(CHAT).text == "plain"
    assert template.render(CHAT | {"tools": [tool]}).text == "for tools"


def test_special_tokens_come_from_all_files(tmp_path: Path) -> None:
    write_model(tmp_path, config={"extra_special_tokens": {"image_token": "<img>"}, "unk_token": None})
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": {"content": "<pad>"}}')

    assert load_files(tmp_path).special_tokens == {
        "bos_token": "<|bos|>",
        "eos_token": "<|im_end|>",
        "image_token": "<img>",
        "pad_token": "<pad>",
    }


def test_a_limit_stored_for_training_cuts_nothing(tmp_path: Path) -> None:
    path = write_model(tmp_path) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(path))

    reference = load_files(tmp_path).reference

    assert len(reference.encode("a b c d e f g h").ids) > 9
    assert len(reference.encode("a").ids) == 1


def test_no_directory_and_no_tokenizer_are_told_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(BadTokenizer, match=r"not a directory.*tokenizer\.json"):
        load_files(tmp_path / "nowhere")
    with pytest.raises(BadTokenizer, match="download it from the model's page"):
        load_files(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"), [("tokenizer.json", "{}"), ("tokenizer_config.json", "{"), ("config.json", "[]")]
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    write_model(tmp_path)
    (tmp_path / name).write_text(content)

    with pytest.raises(BadTokenizer, match=name):
        load_files(tmp_path)
