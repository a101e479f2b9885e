from __future__ import annotations

from pathlib import Path

import pytest
from tiny import write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a small model with a ChatML template."""
    return write_model(tmp_path_factory.mktemp("model"))
