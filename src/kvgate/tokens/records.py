"""What counting returns and raises. Plain records: they know no tokenizer and no file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of one part of a prompt: `system`, `tools`, `messages[3]`, `images`, `audio` or `template`."""

    name: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Count:
    """Prompt tokens of one sequence.

    `prompt_tokens` is what the engine will report when `is_exact`, else a bound from above.
    `source` says how it was got: `tokenizer`, `request` (token ids) or `bound`.
    `parts` add up to `prompt_tokens`; empty unless they were asked for.
    """

    prompt_tokens: int
    source: str
    is_exact: bool
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class Dropped:
    """An accelerator that is not used, and why."""

    name: str
    why: str


class CannotCount(Exception):
    """The prompt cannot be counted here; another source (the engine) has to be asked."""


class TemplateRefused(CannotCount):
    """The chat template rejects this chat, as it will in the engine. The message is the template's."""


class BadTokenizer(Exception):
    """The tokenizer's files cannot be used. The message says what to do about it."""
