"""The tiny model is the same everywhere and small."""

from __future__ import annotations

import hashlib
from pathlib import Path

from kvgate.lab.tiny_gguf import write_tiny_gguf


def test_the_same_bytes_every_time_and_under_a_megabyte(tmp_path: Path) -> None:
    first = write_tiny_gguf(tmp_path / "one.gguf").read_bytes()
    second = write_tiny_gguf(tmp_path / "two.gguf").read_bytes()
    assert hashlib.sha256(first).digest() == hashlib.sha256(second).digest()
    assert len(first) < 1_000_000
