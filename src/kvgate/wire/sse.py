"""An event stream, watched for what it says about tokens; and the one event that the gate asked for.

Promises: bytes are never changed, only held back to the end of their line, and one event may be
taken out. No JSON is read while the stream runs, but for that one event: pieces are searched for a
byte string that text inside JSON cannot contain (a quote within a string is escaped), and what was
found last is parsed when somebody asks for it. Works on the stream's content, not on its framing.

Why whole lines: a client joins and parses a line only when it is whole, so it loses nothing; and a
stream that breaks off can be ended with an event of ours without a torn one in front of it.

What `include_usage` changes on the engines that it is sent to (`gets_usage_asked`): vLLM and SGLang
add one event with empty `choices` before `[DONE]`. That one is taken out, for a naive client reads
`choices[0]`. Old vLLM (before 0.7) also writes `"usage":null` into the other events; that stays, as
OpenAI itself sends it. llama.cpp moves its `timings` from the last event with text into the added
one, which a client would miss; it is not asked, and its timings are read instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvgate.wire.body import Body

USAGE = b'"usage"'
TIMINGS = b'"timings"'
_raw_decode = json.JSONDecoder().raw_decode  # a decoder costs more to make than to use
_NULL_USAGE = b'"usage":null'
_USAGE_OBJECT = re.compile(rb'"usage"\s*:\s*(?=\{)')
_THEN_OBJECT = re.compile(rb"\s*:\s*(?=\{)")
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_EMPTY_LINES = (b"\n", b"\r\n", b"\r")
# A line longer than this is passed on in parts: tokens of one event are few, pictures are not.
LINE_BYTES_MAX = 16 * 1024
# Of an answer that is no stream: its usage stands behind the text, before a few short fields.
TAIL_BYTES = 4096

_ASKED = frozenset({"vllm", "sglang"})


class Usage(NamedTuple):  # made for each answer, in half the time of a frozen dataclass
    """Tokens as the engine reports them. `new` sums over the choices."""

    prompt: int
    new: int

    @property
    def total(self) -> int:
        return self.prompt + self.new


def gets_usage_asked(engine: str) -> bool:
    """Whether this kind of engine adds one event for `include_usage`, and changes no other."""
    return engine in _ASKED


def ask_usage(body: bytes, fields: Mapping[str, Any]) -> bytes | None:
    """The request `body`, whose parsed form is `fields`, with usage asked for in the stream.

    None where the client's own options are to stand: where it asked itself, where they are no
    object (the engine refuses them), and where they hold `continuous_usage_stats`, which would
    begin to work.
    """
    options = fields.get("stream_options")
    if options is None and "stream_options" not in fields:
        brace = body.index(b"{") + 1
        return body[:brace] + b'"stream_options":{"include_usage":true},' + body[brace:]
    if options is not None and not isinstance(options, dict):
        return None
    options = options or {}
    if options.get("include_usage") or options.get("continuous_usage_stats"):
        return None
    # Rare, so that a second look at the whole body does not matter.
    return Body(body).replaced({"stream_options": options | {"include_usage": True}})


def error_event(body: bytes) -> bytes:
    """The event that ends a stream which cannot go on. `body`: an error as JSON in one line."""
    return b"data: " + body + b"\n\n"


def usage_at_end(tail: bytes) -> Usage | None:
    """The usage of an answer, out of its last bytes; None if it is not in them."""
    return _object_at_end(USAGE, tail, _from_usage)


class EventStream:
    """The content of one stream, line by line.

    `mark`: the byte string that is searched for; a piece of whole lines without it may be passed by
    the caller, without `feed`, while `is_at_line_end`. `strips`: the event with empty choices and a
    usage is the gate's own, and is taken out.
    """

    __slots__ = ("_held", "_is_after_strip", "_is_torn", "_last", "_stripped", "_strips", "mark")

    def __init__(self, *, mark: bytes = USAGE, strips: bool = False) -> None:
        self.mark = mark
        self._strips = strips
        self._held = b""  # the begun line
        self._last = b""  # the latest line with the mark
        self._stripped: Usage | None = None
        self._is_after_strip = False
        self._is_torn = False  # a part of the begun line has been passed on

    @property
    def is_at_line_end(self) -> bool:
        return not (self._held or self._is_torn or self._is_after_strip)

    def feed(self, content: bytes) -> bytes:
        """What may be passed on, now that `content` has come."""
        if self._held:
            content = self._held + content
            self._held = b""
        end = content.rfind(b"\n") + 1
        lines, rest = content[:end], content[end:]
        if len(rest) > LINE_BYTES_MAX or (self._is_torn and not end):
            lines, rest, is_torn = content, b"", True
        else:
            is_torn = self._is_torn and not end
        if self._is_after_strip or self.mark in lines:
            lines = self._look(lines)
        self._held = rest
        self._is_torn = is_torn
        return lines

    def end(self) -> bytes:
        """The stream is over: what was held back."""
        held, self._held = self._held, b""
        return held

    def break_off(self, event: bytes) -> bytes:
        """The stream cannot go on. A begun line is dropped, or ended where a part of it is out."""
        self._held = b""
        return (b"\n\n" if self._is_torn else b"\n") + event

    @property
    def usage(self) -> Usage | None:
        """What the engine has reported so far. Parses at most one event."""
        if self._stripped is not None or not self._last:
            return self._stripped
        return usage_at_end(self._last) or _object_at_end(TIMINGS, self._last, _from_timings)

    def _look(self, lines: bytes) -> bytes:
        """Remember lines with the mark; leave out what was only for the gate."""
        # What `"usage":null` in each event costs: two counts.
        is_null = self.mark is USAGE and lines.count(USAGE) == lines.count(_NULL_USAGE)
        if is_null and not self._is_after_strip:
            return lines
        kept = []
        for line in lines.splitlines(keepends=True):
            if self._is_after_strip:
                self._is_after_strip = False
                if line in _EMPTY_LINES:
                    continue  # the empty line that ended the event
            if self.mark in line and (self.mark is TIMINGS or _USAGE_OBJECT.search(line)):
                if self._strips and self._is_ours(line):
                    self._is_after_strip = True
                    continue
                self._last = line
            kept.append(line)
        return b"".join(kept)

    def _is_ours(self, line: bytes) -> bool:
        if not _NO_CHOICES.search(line):
            return False  # an engine may be set to tell usage in each event
        event = _event(line)
        if event.get("choices") != []:
            return False
        usage = _from_usage(event.get("usage"))
        if usage is None:
            return False
        self._stripped = usage
        return True


def _event(line: bytes) -> dict[str, Any]:
    """The object in a `data:` line; empty where there is none."""
    name, _, data = line.partition(b":")
    if name != b"data":
        return {}
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _object_at_end(name: bytes, text: bytes, read: Callable[[Any], Usage | None]) -> Usage | None:
    """The last object of this name from which `read` gets figures."""
    at = len(text)
    # Searched from the end, and only what stands there is parsed.
    while (at := text.rfind(name, 0, at)) >= 0:
        found = _THEN_OBJECT.match(text, at + len(name))
        if found is None:
            continue
        try:
            value, _ = _raw_decode(text[found.end() :].decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            continue
        usage = read(value)
        if usage is not None:
            return usage
    return None


def _from_usage(value: Any) -> Usage | None:
    """Under the names of the completions APIs, or those of responses and messages."""
    if not isinstance(value, dict):
        return None
    if "prompt_tokens" in value:
        return _figures(value["prompt_tokens"], value.get("completion_tokens", 0))
    return _figures(value.get("input_tokens"), value.get("output_tokens", 0))


def _from_timings(value: Any) -> Usage | None:
    """llama.cpp: tokens computed, tokens found in its cache, tokens generated."""
    if not isinstance(value, dict):
        return None
    computed, cached = value.get("prompt_n"), value.get("cache_n")
    if not isinstance(computed, int) or not isinstance(cached, int):
        return None
    return _figures(computed + cached, value.get("predicted_n"))


def _figures(prompt: Any, new: Any) -> Usage | None:
    # `type`, because a boolean is an `int` to `isinstance`.
    if type(prompt) is int and type(new) is int and prompt >= 0 and new >= 0:
        return Usage(prompt, new)
    return None
