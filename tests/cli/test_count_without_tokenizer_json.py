"""`kvgate count` with a directory that has a SentencePiece model, or Mistral's own file."""

from __future__ import annotations

import json
from pathlib import Path

import mistral_common
import pytest
from click.testing import CliRunner

from kvgate.cli.count import count

DATA = Path(mistral_common.__file__).parent / "data"
CHAT = {"messages": [{"role": "user", "content": "one two three"}], "max_tokens": 5}


@pytest.mark.parametrize(
    ("source", "name", "config", "tokens"),
    [
        # [INST], [/INST] and BOS are one token each, where mistral-common writes them.
        ("mistral_instruct_tokenizer_240323.model.v3", "tokenizer.model.v3", None, 6),
        ("tekken_240718.json", "tekken.json", None, 6),
        ("tokenizer.model.v1", "tokenizer.model", {"chat_template": "<s>{{ messages[0].content }}"}, 4),
    ],
)
def test_a_chat_is_counted(
    source: str, name: str, config: dict[str, str] | None, tokens: int, tmp_path: Path
) -> None:
    (tmp_path / name).symlink_to(DATA / source)
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    result = CliRunner().invoke(count, ["-", "--tokenizer", str(tmp_path), "--json"], input=json.dumps(CHAT))

    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert (found["prompt_tokens"], found["is_exact"], found["output_cap"]) == (tokens, True, 5)
    assert sum(part["tokens"] for part in found["parts"]) == tokens


def test_a_damaged_file_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")

    result = CliRunner().invoke(count, ["-", "--tokenizer", str(tmp_path)], input=json.dumps(CHAT))

    assert result.exit_code == 2
    assert "tokenizer.model is not a SentencePiece model" in result.output
