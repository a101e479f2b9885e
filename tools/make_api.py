"""Writes docs/api.md out of the docstrings of the public names: `python tools/make_api.py`.

With --check it writes nothing and ends with 1 if the file is not what the docstrings say.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODULES = ("kvgate", "kvgate.asgi", "kvgate.vllm")
FILE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
HEAD = """# API reference

Made from the docstrings by `python tools/make_api.py`. What is not listed here is not public.
"""


def lines() -> Iterator[str]:
    yield HEAD
    for name in MODULES:
        module = importlib.import_module(name)
        yield f"## `{name}`\n\n{inspect.getdoc(module)}\n"
        for member in sorted(module.__all__, key=str.lower):
            yield from _entry(member, getattr(module, member))


def _entry(name: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value):
        yield f"### `{name}`\n\n{_doc(value)}\n"
        yield from _members(value)
    elif inspect.isfunction(value):
        yield f"### `{name}{_signature(value)}`\n\n{_doc(value)}\n"
    elif isinstance(value, dict):
        yield f"### `{name}`\n\nThe names {', '.join(f'`{key}`' for key in value)}.\n"


def _members(owner: type) -> Iterator[str]:
    if owner.__doc__ and "__init__" in vars(owner) and owner.__init__.__doc__:  # type: ignore[misc]
        yield f"- `{owner.__name__}{_signature(owner)}`: {_inline(owner.__init__)}\n"  # type: ignore[misc]
    seen = {}
    for base in reversed(owner.__mro__[:-1]):
        if base.__module__.startswith("kvgate"):
            seen.update(vars(base))
    for name, value in seen.items():
        inner = getattr(value, "__func__", value)
        if name.startswith("_"):
            continue
        if isinstance(value, property) and value.__doc__:
            yield f"- `{name}`: {_inline(value)}\n"
        elif inspect.isfunction(inner) and inner.__doc__:
            yield f"- `{name}{_signature(inner)}`: {_inline(inner)}\n"


def _signature(value: Any) -> str:
    shown = str(inspect.signature(value))
    # Of defaults that are objects only the class is worth reading.
    shown = re.sub(r"<function (\w+) at 0x[0-9a-f]+>", r"\1", shown.replace("'", ""))
    return re.sub(r"kvgate\.[a-z_.]+\.", "", shown).replace("(self, ", "(").replace("(self)", "()")


def _doc(value: Any) -> str:
    return inspect.cleandoc(value.__doc__ or "")


def _inline(value: Any) -> str:
    return re.sub(r"\s*\n\s*", " ", _doc(value))


def main() -> int:
    text = "\n".join(lines())
    if "--check" not in sys.argv:
        FILE.write_text(text, "utf-8")
        return 0
    if FILE.exists() and FILE.read_text("utf-8") == text:
        return 0
    print("docs/api.md is not what the docstrings say: run python tools/make_api.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
