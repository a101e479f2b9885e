"""Reading numbers out of a Hugging Face `config.json` that many hands have written.

Promise: a number is found under any of its customary names, a missing or nonsensical one raises
`UnknownGeometry` that names it, and nothing is ever guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvgate.core.geometry.layers import UnknownGeometry

Config = Mapping[str, Any]

HOW_TO_GIVE = (
    "Give the engine's own figures instead, in the configuration file: [pool] total_blocks, block_size and "
    "context."
)

# Where a multi-modal configuration keeps its language model, the more specific name first.
_TEXT = ("thinker_config", "text_config", "llm_config", "language_config", "language_model_config")


def unknown(what: str) -> UnknownGeometry:
    """The error for a model whose cache cannot be told: what is missing, and what to do instead."""
    return UnknownGeometry(f"{what}. {HOW_TO_GIVE}")


def text_config(config: Config) -> Config:
    """The part that describes the language model: nested configurations are followed."""
    for name in _TEXT:
        inner = config.get(name)
        if isinstance(inner, Mapping):
            return text_config(inner)
    return config


class Fields:
    """One configuration, read by customary names. `model_type` is the key to its peculiarities."""

    def __init__(self, config: Config) -> None:
        if not isinstance(config, Mapping):
            raise UnknownGeometry(f"a model configuration is a JSON object, not {type(config).__name__}")
        text = text_config(config)
        outer = str(config.get("model_type") or "")
        self.config = text
        self.outer = config
        self.model_type = str(text.get("model_type") or outer)

    def get(self, *names: str) -> Any:
        """The first of these fields that is set, or None."""
        return next((self.config[name] for name in names if self.config.get(name) is not None), None)

    def maybe(self, *names: str) -> int | None:
        """A whole number above 0, or None where it is not set (0 and false mean not set)."""
        value = self.get(*names)
        if value is None or value is False or value == 0:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise unknown(f"{names[0]} in the model configuration is {value!r}, not a whole number above 0")
        return value

    def need(self, *names: str) -> int:
        """As `maybe`, and an error that names the field where it is missing."""
        value = self.maybe(*names)
        if value is None:
            others = f" (or {', '.join(names[1:])})" if names[1:] else ""
            kind = self.model_type or "no model_type"
            raise unknown(f"the model configuration ({kind}) does not say {names[0]}{others}")
        return value

    def names(self, *names: str) -> list[Any] | None:
        """A list field, or None."""
        value = self.get(*names)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise unknown(f"{names[0]} in the model configuration is {value!r}, not a list")
        return list(value)

    def inner(self, name: str) -> Fields:
        """A nested object (`attn_config`, `linear_attn_config`), empty where it is missing."""
        found = self.config.get(name)
        fields = Fields({})
        fields.config = found if isinstance(found, Mapping) else {}
        fields.model_type = f"{self.model_type}, {name}"
        return fields
