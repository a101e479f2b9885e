"""A source file is one idea: it says what it promises, and stays short enough to be read at once."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "kvgate"
LINES_MAX = 300


def too_long(files: dict[str, str]) -> list[str]:
    return [name for name, text in files.items() if len(text.splitlines()) > LINES_MAX]


def silent(files: dict[str, str]) -> list[str]:
    return [name for name, text in files.items() if text.strip() and not ast.get_docstring(ast.parse(text))]


def sources() -> dict[str, str]:
    return {str(path.relative_to(SRC)): path.read_text() for path in sorted(SRC.rglob("*.py"))}


def test_no_source_file_is_longer_than_300_lines() -> None:
    assert too_long(sources()) == []


def test_every_source_file_opens_with_what_it_promises() -> None:
    assert silent(sources()) == []


def test_a_long_file_and_a_silent_one_are_found() -> None:
    assert too_long({"a": "x\n" * 301, "b": "x\n" * 300}) == ["a"]
    assert silent({"a": "x = 1\n", "b": '"""Says."""\n', "c": ""}) == ["a"]


def test_no_two_test_files_have_one_name() -> None:
    # pytest would collect only the first of them, and only when both folders are asked for.
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
