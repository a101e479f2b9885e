"""One gateway and one scripted engine for each test file; every test must leave the pool empty."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import Stack


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Room for many, short time-outs."""
    started = Stack()
    yield started
    started.stop()
