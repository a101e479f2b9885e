"""Faster tokenizers, used only where they count like the reference.

Promises: `pick` returns an accelerator that gave the reference's count for every text of the check,
or None, and says why each other one was not taken. An accelerator that is not installed is simply
not there. Counting with them needs no lock; the first call of some builds tables, and happens here.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvgate.tokens.records import Dropped

CountText = Callable[[str], int]
# From the path of a tokenizer.json and its added tokens to a way to count.
Load = Callable[[Path, Sequence[str]], CountText]
# A tokenizer with more added tokens than this would be searched slowly; the next accelerator is taken.
ADDED_MAX = 4096


@dataclass(frozen=True, slots=True)
class Accelerator:
    """`count` gives the tokens of a text, added tokens in it taken as tokens, nothing put around it."""

    name: str
    count: CountText


def pick(
    loaders: Sequence[tuple[str, Load]],
    path: Path,
    added: Sequence[str],
    texts: Iterable[str],
    reference: CountText,
) -> tuple[Accelerator | None, list[Dropped]]:
    """The first of `loaders` for the tokenizer.json at `path` that counts all `texts` like `reference`."""
    dropped: list[Dropped] = []
    expected = [(text, reference(text)) for text in texts]
    for name, load in loaders:
        try:
            count = load(path, added)
            wrong = next((text for text, tokens in expected if count(text) != tokens), None)
        except ModuleNotFoundError:
            continue
        except Exception as error:  # a foreign library: whatever it raises means that it is not used
            dropped.append(Dropped(name, f"cannot load this tokenizer: {_first_line(error)}"))
            continue
        if wrong is None:
            return Accelerator(name, count), dropped
        dropped.append(Dropped(name, f"counts {wrong[:80]!r} differently"))
    return None, dropped


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _quicktok(path: Path, added: Sequence[str]) -> CountText:
    import quicktok
    from quicktok.importer import import_tokenizer

    if len(added) > ADDED_MAX:
        raise ValueError(f"{len(added)} added tokens")
    # It loads from files that it writes itself, reports on the standard output, and leaves the
    # closing of files to the collector.
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", ResourceWarning)
        import_tokenizer(str(path), "model", data_dir=folder)
        tokenizer = quicktok.Tokenizer("model", folder)
    plain: CountText = tokenizer.count
    longest_first = sorted(added, key=len, reverse=True)
    search = re.compile("|".join(map(re.escape, longest_first))).search if added else None

    def count(text: str) -> int:
        # `count` knows no added tokens, and makes no list; most pieces hold none.
        if search is not None and search(text):
            return len(tokenizer.encode_with_special(text))
        return plain(text)

    return count


def _fastokens(path: Path, added: Sequence[str]) -> CountText:
    from fastokens import Tokenizer

    encode = Tokenizer.from_file(str(path)).encode
    return lambda text: len(encode(text))


# Tried in this order: by speed on large texts. kitoken is not among them: a long run of one kind can
# overflow its stack (DeepSeek V3's pattern), which ends the whole process.
ACCELERATORS: tuple[tuple[str, Load], ...] = (
    ("quicktok", _quicktok),
    ("fastokens", _fastokens),
)
