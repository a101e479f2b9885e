"""A JSON object body, with the place of every top-level value.

Promise: `replaced` changes the named values and nothing else, so what the client wrote (number
formats, key order, escapes, unknown fields) reaches the engine as it came.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn


class BadBody(ValueError):
    """The body is not a request; the message is for the client. `param` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def _not_a_number(text: str) -> NoReturn:
    raise BadBody(f"the body is not valid JSON: {text} is not a JSON number")


_scan_value = json.JSONDecoder(parse_constant=_not_a_number).scan_once  # type: ignore[attr-defined]
_scan_string = json.decoder.scanstring  # type: ignore[attr-defined]
# Both names are public in the standard library and absent from its type stubs.
_SPACE = " \t\n\r"


class Body:
    """The parsed object, the text it came from, and where in the text each value stands."""

    __slots__ = ("fields", "spans", "text")

    def __init__(self, raw: bytes) -> None:
        if not raw:
            raise BadBody("the body is empty; send a JSON object")
        try:
            self.text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadBody(f"the body is not UTF-8 (byte {error.start})") from None
        self.fields: dict[str, Any] = {}
        self.spans: dict[str, tuple[int, int]] = {}
        try:
            self._scan()
        except (ValueError, StopIteration, IndexError) as error:
            if isinstance(error, BadBody):
                raise
            raise BadBody(f"the body is not valid JSON: {_first_line(error)}") from None
        except RecursionError:
            raise BadBody("the body is nested too deeply") from None

    def _scan(self) -> None:
        text = self.text
        at = _skip(text, 0)
        if text[at] != "{":
            _scan_value(text, at)
            raise BadBody("the body must be a JSON object")
        at = _skip(text, at + 1)
        if text[at] == "}":
            self._end(at + 1)
            return
        while True:
            if text[at] != '"':
                raise ValueError(f"expected a key at character {at}")
            key, at = _scan_string(text, at + 1, True)
            at = _skip(text, at)
            if text[at] != ":":
                raise ValueError(f"expected ':' at character {at}")
            start = _skip(text, at + 1)
            value, end = _scan_value(text, start)
            if key in self.spans:
                # Parsers disagree on which one counts, so one of them would go unpriced.
                raise BadBody(f"the key {key!r} appears twice", key)
            self.fields[key] = value
            self.spans[key] = (start, end)
            at = _skip(text, end)
            if text[at] == "}":
                self._end(at + 1)
                return
            if text[at] != ",":
                raise ValueError(f"expected ',' or '}}' at character {at}")
            at = _skip(text, at + 1)

    def _end(self, at: int) -> None:
        if self.text[at:].strip(_SPACE):
            raise ValueError(f"extra data at character {at}")

    def replaced(self, values: dict[str, int]) -> bytes:
        """The body with these integer values in place of (or in addition to) what is there."""
        edits = [(self.spans[k], str(v)) for k, v in values.items() if k in self.spans]
        added = "".join(f'"{k}":{v},' for k, v in values.items() if k not in self.spans)
        text = self.text
        for (start, end), new in sorted(edits, reverse=True):
            text = text[:start] + new + text[end:]
        if added:
            brace = text.index("{") + 1
            text = text[:brace] + (added if self.fields else added[:-1]) + text[brace:]
        return text.encode("utf-8")


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
