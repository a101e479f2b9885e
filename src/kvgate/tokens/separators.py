"""Where a prompt can be cut so that its parts can be counted on their own.

A tokenizer takes its added tokens out of the text before anything else, so that what stands between
two of them is tokenized alone: counts add up. Promises: a cut is made only at tokens for which that
holds: exact matches that no other added token overlaps. Whether it holds for the tokenizer as a
whole is for the caller to verify.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

# A chat template writes few kinds; a long alternation would be slow where the first letters differ.
SEPARATORS_MAX = 64


@dataclass(frozen=True, slots=True)
class AddedToken:
    """One added token of a tokenizer.json."""

    content: str
    exact: bool  # no stripping of spaces around it, no word borders, not subject to a normalizer


def separators(added: Sequence[AddedToken], written: str) -> tuple[str, ...]:
    """The added tokens at which text may be cut: those that the chat template writes (`written`)."""
    wanted = [token for token in added if token.exact and len(token.content) > 2 and token.content in written]
    contents = [token.content for token in added]
    safe = [token.content for token in wanted if not any(_covers(other, token.content) for other in contents)]
    return tuple(sorted(safe, key=len, reverse=True)[:SEPARATORS_MAX])


def cutter(tokens: Sequence[str]) -> re.Pattern[str] | None:
    """A pattern that finds the next separator; None when there is none."""
    return re.compile("|".join(map(re.escape, tokens))) if tokens else None


def openers(tokens: Sequence[str]) -> tuple[str, ...]:
    """The separators at which a text may be cut when one begins there, whatever stands before it.

    Not those that can begin within themselves, nor with a space, which a token before may take.
    """
    return tuple(one for one in tokens if one.strip() == one and not _begins_within_itself(one))


def _begins_within_itself(token: str) -> bool:
    return any(token.startswith(token[at:]) for at in range(1, len(token)))


def _covers(other: str, token: str) -> bool:
    """Whether a match of `other` can begin before or at `token` and take a piece of it."""
    if other == token:
        return False
    if token in other:
        return True
    return any(other.endswith(token[:length]) for length in range(1, min(len(other), len(token))))
