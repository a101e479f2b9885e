"""The small model of the tokenizer tests, for tests of the gateway."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

_TINY = Path(__file__).parents[1] / "tokens" / "tiny.py"
write_model: Callable[[Path], Path] = runpy.run_path(str(_TINY))["write_model"]
