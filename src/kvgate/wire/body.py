"""A JSON object body, parsed once; the place of a value is looked up when it is to be replaced.

Promise: `replaced` changes the named values and nothing else, so what the client wrote (number
formats, key order, escapes, unknown fields) reaches the engine as it came. A key that appears twice
in one object, at any depth, is refused: parsers disagree on which one counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn, TypeAlias

Path: TypeAlias = tuple[str | int, ...]
"""Keys and list indexes from the body down to one value."""


class BadBody(ValueError):
    """The body is not a request; the message is for the client. `param` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def _not_a_number(text: str) -> NoReturn:
    raise BadBody(f"the body is not valid JSON: {text} is not a JSON number")


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                _appears_twice(name)
            seen.add(name)
    return found


def _appears_twice(name: str) -> NoReturn:
    raise BadBody(f"the key {name[:200]!r} appears twice", name[:200])


_decoder = json.JSONDecoder(parse_constant=_not_a_number, object_pairs_hook=_without_doubles)
_scan_value = _decoder.scan_once  # type: ignore[attr-defined]
_scan_string = json.decoder.scanstring  # type: ignore[attr-defined]
# Both names are public in the standard library and absent from its type stubs.
_SPACE = " \t\n\r"
Span: TypeAlias = tuple[int, int]


class Body:
    """The parsed object, the bytes and the text it came from."""

    __slots__ = ("fields", "raw", "text")

    def __init__(self, raw: bytes) -> None:
        if not raw:
            raise BadBody("the body is empty; send a JSON object")
        self.raw = raw
        try:
            self.text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadBody(f"the body is not UTF-8 (byte {error.start})") from None
        self.fields: dict[str, Any] = _parse(self.text)

    def at(self, path: Path) -> Any:
        """The value at `path`; None where there is none."""
        value: Any = self.fields
        for step in path:
            if isinstance(step, str):
                value = value.get(step) if isinstance(value, dict) else None
            else:
                value = value[step] if isinstance(value, list) and step < len(value) else None
        return value

    def replaced(self, values: Mapping[str, Any] | Mapping[Path, Any]) -> bytes:
        """The body with these JSON values in place of (or in addition to) what is there.

        A key is a name at the top, or the path of a nested value; an object on the way that is
        missing, or null, is made. Raises `LookupError` for a path through anything else.
        """
        new: dict[Path, Any] = {}
        for key, value in values.items():
            path: Path = (key,) if isinstance(key, str) else key
            while len(path) > 1 and self.at(path[:-1]) is None and isinstance(path[-1], str):
                path, value = path[:-1], {path[-1]: value}
            _merge(new, path, value)
        edits: list[tuple[int, int, str]] = []
        added: dict[Path, dict[str, Any]] = {}
        for path, value in new.items():
            parent, name = self.at(path[:-1]), path[-1]
            if isinstance(parent, dict) and isinstance(name, str) and name not in parent:
                added.setdefault(path[:-1], {})[name] = value
            elif (span := self._span(path)) is not None:
                edits.append((*span, json.dumps(value, allow_nan=False)))
            else:
                raise LookupError(f"the body has no place for {path!r}")
        for path, fields in added.items():
            start = self._brace(path) + 1
            inner = json.dumps(fields, allow_nan=False, separators=(",", ":"))[1:-1]
            edits.append((start, start, inner + "," if self.at(path) else inner))
        text = self.text
        for start, end, written in sorted(edits, reverse=True):
            text = text[:start] + written + text[end:]
        return text.encode("utf-8")

    def _brace(self, path: Path) -> int:
        if not path:
            return _skip(self.text, 0)
        span = self._span(path)
        assert span is not None
        return span[0]

    def _span(self, path: Path) -> Span | None:
        """Where the value at `path` stands; looked up anew, as only few bodies need it."""
        first, *rest = path
        top = _scan_object(self.text, self._brace(()))[1]
        span = top.get(first) if isinstance(first, str) else None
        for step in rest:
            if span is None:
                return None
            opening = self.text[span[0]]
            if isinstance(step, str) and opening == "{":
                span = _scan_object(self.text, span[0])[1].get(step)
            elif isinstance(step, int) and opening == "[":
                spans = _scan_list(self.text, span[0])
                span = spans[step] if step < len(spans) else None
            else:
                return None
        return span


def _parse(text: str) -> dict[str, Any]:
    """The object that `text` is. Raises `BadBody`."""
    try:
        # The whole body in one call into C, three times as fast as key by key ...
        value, end = _scan_value(text, _skip(text, 0))
        if type(value) is dict and (end == len(text) or not text[end:].strip(_SPACE)):
            return value
    except BadBody:
        raise
    except (ValueError, StopIteration, IndexError, RecursionError):
        pass
    return _parse_slowly(text)  # ... which tells better what is wrong, and where


def _parse_slowly(text: str) -> dict[str, Any]:
    try:
        at = _skip(text, 0)
        if text[at] != "{":
            _scan_value(text, at)
            raise BadBody("the body must be a JSON object")
        fields, _, end = _scan_object(text, at)
        if text[end:].strip(_SPACE):
            raise ValueError(f"extra data at character {end}")
    except BadBody:
        raise
    except (ValueError, StopIteration, IndexError) as error:
        raise BadBody(f"the body is not valid JSON: {_first_line(error)}") from None
    except RecursionError:
        raise BadBody("the body is nested too deeply") from None
    return fields


def _merge(into: dict[Any, Any], name: Any, value: Any) -> None:
    """Two new values below one new object share that object."""
    if isinstance(value, dict) and isinstance(into.get(name), dict):
        for inner, inner_value in value.items():
            _merge(into[name], inner, inner_value)
    else:
        into[name] = value


def _scan_object(text: str, at: int) -> tuple[dict[str, Any], dict[str, Span], int]:
    """Values and places of the object at `at`, and where it ends."""
    fields: dict[str, Any] = {}
    spans: dict[str, Span] = {}
    at = _skip(text, at + 1)
    if text[at] == "}":
        return fields, spans, at + 1
    while True:
        if text[at] != '"':
            raise ValueError(f"expected a key at character {at}")
        key, at = _scan_string(text, at + 1, True)
        at = _skip(text, at)
        if text[at] != ":":
            raise ValueError(f"expected ':' at character {at}")
        start = _skip(text, at + 1)
        value, end = _scan_value(text, start)
        if key in spans:
            _appears_twice(key)
        fields[key] = value
        spans[key] = (start, end)
        at = _skip(text, end)
        if text[at] == "}":
            return fields, spans, at + 1
        if text[at] != ",":
            raise ValueError(f"expected ',' or '}}' at character {at}")
        at = _skip(text, at + 1)


def _scan_list(text: str, at: int) -> list[Span]:
    """Places of the members of the list at `at`, which is known to be valid."""
    spans: list[Span] = []
    at = _skip(text, at + 1)
    while text[at] != "]":
        end = _scan_value(text, at)[1]
        spans.append((at, end))
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return spans


def _skip(text: str, at: int) -> int:
    while text[at] in _SPACE:
        at += 1
    return at


def _first_line(error: BaseException) -> str:
    if isinstance(error, StopIteration):
        return f"no value at character {error.value}"
    if isinstance(error, IndexError):
        return "it ends too early"
    return str(error).splitlines()[0][:200]
