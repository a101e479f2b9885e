"""`kvgate count` on a small tokenizer of our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tokenizers import Tokenizer, models, pre_tokenizers

from kvgate.cli.count import count


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Every byte is a token: counts can be told by hand."""
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return tmp_path


def run(model: Path, body: Any, *flags: str) -> Result:
    text = body if isinstance(body, str) else json.dumps(body)
    return CliRunner().invoke(count, ["-", "--tokenizer", str(model), *flags], input=text)


def answer(model: Path, body: Any, *flags: str) -> dict[str, Any]:
    result = run(model, body, "--json", *flags)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.output))


CHAT = {
    "messages": [{"role": "system", "content": "abc"}, {"role": "user", "content": "hello"}],
    "max_tokens": 50,
    "n": 2,
}


def test_a_chat_is_counted_by_part(model: Path) -> None:
    found = answer(model, CHAT)

    assert found["prompt_tokens"] == 10
    assert found["sequences"] == 2
    assert found["output_cap"] == 50
    assert found["source"] == "tokenizer"
    assert found["parts"] == [
        {"name": "system", "tokens": 3},
        {"name": "messages[1]", "tokens": 5},
        {"name": "template", "tokens": 2},
    ]


def test_a_list_of_prompts_is_counted_one_by_one(model: Path) -> None:
    found = answer(model, {"prompt": ["abc", "hello"], "max_tokens": 1})

    assert found["prompt_tokens"] == 8
    assert found["sequences"] == 2
    assert [part["tokens"] for part in found["parts"]] == [3, 5]


def test_token_ids_are_their_own_count(model: Path) -> None:
    found = answer(model, {"prompt": [1, 2, 3, 4], "max_tokens": 1})

    assert (found["prompt_tokens"], found["source"]) == (4, "request")


def test_the_same_prompt_counts_alike_through_other_dialects(model: Path) -> None:
    messages = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "model": "m"}

    chat = answer(model, messages)
    assert answer(model, messages, "--path", "/v1/messages")["prompt_tokens"] == chat["prompt_tokens"]
    assert answer(model, {"input": "hello", "model": "m"})["prompt_tokens"] == chat["prompt_tokens"]


def test_the_table_shows_the_parts_and_the_sum(model: Path) -> None:
    result = run(model, CHAT)

    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert ["messages[1]", "5"] in lines
    assert ["Prompt", "tokens", "10", "exact,", "by"] in [line[:5] for line in lines]


@pytest.mark.parametrize(
    ("body", "flags", "why"),
    [
        ("{", (), "would refuse"),
        ({"messages": []}, (), "would refuse"),
        (CHAT, ("--path", "/v1/nowhere"), "no priced endpoint"),
        (CHAT | {"chat_template": "x"}, (), "without the engine"),
    ],
)
def test_what_cannot_be_counted_is_told_and_exits_with_2(
    model: Path, body: Any, flags: tuple[str, ...], why: str
) -> None:
    result = run(model, body, *flags)

    assert result.exit_code == 2
    assert why in result.output


def test_a_directory_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    result = run(tmp_path, CHAT)

    assert result.exit_code == 2
    assert "tokenizer.json" in result.output
