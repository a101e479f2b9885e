"""Readers of engine pages: JSON and Prometheus text, both taken with a grain of salt.

Promise: nothing here raises on what an engine sends. A value that is missing, of another type,
negative, infinite or no number is None.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvgate.wire.engines.found import Page, Pages

_SAMPLE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*$")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"\s*,?\s*')
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}
# More than a page of figures of any engine holds by far; larger numbers are nonsense.
_MOST = 2**53


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of a metrics page."""

    name: str
    labels: Mapping[str, str]
    value: float


def json_of(page: Page | None) -> Any:
    """The JSON of an answer with status 200, or None."""
    if page is None or not page.is_ok:
        return None
    try:
        return json.loads(page.text)
    except (ValueError, RecursionError):
        return None


def object_of(pages: Pages, path: str) -> Mapping[str, Any]:
    """The JSON object at `path`; empty where there is none."""
    found = json_of(pages.get(path))
    return found if isinstance(found, dict) else {}


def inside(value: Any, *path: str | int) -> Any:
    """What is at `path` inside nested objects and lists; None where it ends earlier."""
    for step in path:
        if isinstance(step, str) and isinstance(value, dict):
            value = value.get(step)
        elif isinstance(step, int) and isinstance(value, list) and -len(value) <= step < len(value):
            value = value[step]
        else:
            return None
    return value


def whole(value: Any, least: int = 0) -> int | None:
    """A whole number of at least `least`, also written as text or as 12.0."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    if not math.isfinite(number) or number != int(number) or not least <= number <= _MOST:
        return None
    return int(number)


def size(value: Any) -> int | None:
    """A whole number above 0."""
    return whole(value, 1)


def samples(page: Page | None, *names: str) -> list[Sample]:
    """The samples of these names (all, where none is given); lines that are none are left out."""
    if page is None or not page.is_ok:
        return []
    found = []
    for line in page.text.splitlines():
        if line.startswith("#") or (names and not line.startswith(names)):
            continue
        parts = _SAMPLE.match(line)
        if parts is None or (names and parts[1] not in names):
            continue
        try:
            value = float(parts[3])
        except ValueError:
            continue
        labels = {key: _plain(text) for key, text in _LABEL.findall(parts[2] or "")}
        found.append(Sample(parts[1], labels, value))
    return found


def total(found: Iterable[Sample]) -> int | None:
    """The sum of counters or gauges over their labels; None without any, or with one that is none."""
    numbers = [whole(sample.value) for sample in found]
    known = [number for number in numbers if number is not None]
    return sum(known) if known and len(known) == len(numbers) else None


def models_in(pages: Pages, path: str = "/v1/models") -> list[Mapping[str, Any]]:
    """The entries of OpenAI's list of models."""
    listed = object_of(pages, path).get("data")
    entries = listed if isinstance(listed, list) else []
    return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]


def names_of(entries: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The names of models, aliases with them, each once."""
    names: dict[str, None] = {}
    for entry in entries:
        aliases = entry.get("aliases")
        for name in (entry["id"], *(aliases if isinstance(aliases, list) else ())):
            if isinstance(name, str) and name:
                names[name] = None
    return tuple(names)


def _plain(text: str) -> str:
    return re.sub(r"\\.", lambda found: _ESCAPES.get(found[0], found[0]), text) if "\\" in text else text
