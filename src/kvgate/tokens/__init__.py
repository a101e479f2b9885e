"""Text to exact token counts: chat templates, tokenizers, caches. CPU only; it opens no socket.

Start at `counter.PromptCounter`; `load` makes one from a model's directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvgate.tokens.counter import PromptCounter
from kvgate.tokens.loader import load_files
from kvgate.tokens.records import BadTokenizer, CannotCount, Count, Dropped, Part, TemplateRefused

__all__ = [
    "BadTokenizer",
    "CannotCount",
    "Count",
    "Dropped",
    "Part",
    "PromptCounter",
    "TemplateRefused",
    "load",
]


def load(directory: str | Path, **options: Any) -> PromptCounter:
    """A counter for the model in `directory`; options as of `PromptCounter`. Raises `BadTokenizer`."""
    return PromptCounter(load_files(directory), **options)
