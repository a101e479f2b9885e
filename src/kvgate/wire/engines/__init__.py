"""What differs between engines: endpoints, counting, cap rules, abort grace, headers to drop."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from kvgate.core.record import record
from kvgate.wire.dialects.shape import Api, Conversation, Mixed, Part, RequestShape
from kvgate.wire.engines import bounds
from kvgate.wire.routes import Routes

# Above this many texts in an embedding request, counting calls cost more than the bound wastes.
POOLED_CALLS_MAX = 64


@record
class CountCall:
    """One POST to the engine that answers with a number of prompt tokens."""

    path: str
    body: bytes
    read: Callable[[bytes], int]


class NoCount(ValueError):
    """The engine's answer to a counting call holds no count."""


Sum: TypeAlias = tuple[CountCall | int, ...]


@record
class CountPlan:
    """How the prompts of a request are counted: for each part the calls and numbers to add up.

    `source`: "request" (token ids, their own count), "engine" (exact), or "bound" (never too low,
    and marked as such). `is_whole_context`: nothing is counted; each part costs a whole context,
    `why` says for what reason.
    """

    parts: tuple[Sum, ...]
    source: str
    is_whole_context: bool = False
    why: str = ""

    @property
    def known(self) -> tuple[int, ...] | None:
        """The counts, where no call is needed for them."""
        numbers = []
        for terms in self.parts:
            number = 0
            for term in terms:
                if not isinstance(term, int):
                    return None
                number += term
            numbers.append(number)
        return tuple(numbers)


@dataclass(frozen=True, slots=True)
class Engine:
    """The rules of one kind of engine.

    `routes`: priced endpoints; `free_posts`: POST paths that generate nothing.
    `count_text`, `count_chat`: the counting call for a text, and for a conversation in the API it
    came in (None: the engine has none for it; then a bound is used).
    `counts_media`: the counting endpoint counts images as generation does.
    `is_partitioned`: each sequence owns a slot of a whole context, whatever it asks for.
    `stream_usage`: `stream_options.include_usage` is understood.
    `abort_grace`: seconds after its connection closed until the engine has surely let go.
    `idle_connection`: seconds after which an unused connection is not trusted to be open.
    `drop_headers`: request headers that would defeat the gate.
    `rank_header`: the request header that chooses a data-parallel rank (None: it cannot be chosen).
    `capacity`, `unit`, `context`: where the size of the cache and of a sequence are read, and in what
    it is counted. `cap_rules`: what the engine does about the output cap.
    `when_full`: what happens when the cache runs out; `cannot_know`: what stays hidden from the gate.
    """

    name: str
    abort_grace: float
    idle_connection: float
    routes: Routes = field(default_factory=dict)
    free_posts: frozenset[bytes] = frozenset()
    count_text: Callable[[RequestShape, str], CountCall] | None = None
    count_chat: Callable[[RequestShape, Conversation], CountCall | None] | None = None
    counts_media: bool = False
    is_partitioned: bool = False
    stream_usage: bool = True
    drop_headers: frozenset[bytes] = frozenset()
    rank_header: bytes | None = None
    capacity: str = ""
    unit: str = ""
    context: str = ""
    cap_rules: str = ""
    when_full: str = ""
    cannot_know: tuple[str, ...] = ()

    def plan(self, shape: RequestShape) -> CountPlan:
        """How to count `shape`. Never empty, and never 0 for a prompt that is there."""
        why = shape.unseen or self._uncounted(shape)
        if why:
            return CountPlan((), "bound", is_whole_context=True, why=why)
        is_many = shape.api is Api.POOLING and len(shape.parts) > POOLED_CALLS_MAX
        parts, sources = [], {"request"}
        for part in shape.parts:
            terms, source = self._terms(shape, part, is_many)
            parts.append(terms)
            sources.add(source)
        source = "bound" if "bound" in sources else "engine" if "engine" in sources else "request"
        return CountPlan(tuple(parts), source)

    def _uncounted(self, shape: RequestShape) -> str | None:
        if self.is_partitioned:
            return "each sequence of this engine owns a slot of a whole context"
        for part in shape.parts:
            if not isinstance(part, Conversation):
                continue
            if part.media and not (self.counts_media and self._chat_call(shape, part)):
                return "images and audio are not counted here"
            if "chat_template" in part.options and self._chat_call(shape, part) is None:
                return "the request brings its own chat template"
        return None

    def _chat_call(self, shape: RequestShape, part: Conversation) -> CountCall | None:
        return self.count_chat(shape, part) if self.count_chat is not None else None

    def _terms(self, shape: RequestShape, part: Part, is_many: bool) -> tuple[Sum, str]:
        text = None if is_many else self.count_text
        if isinstance(part, list):
            return (len(part),), "request"
        if isinstance(part, str):
            return ((text(shape, part),), "engine") if text else ((bounds.text_bound(part),), "bound")
        if isinstance(part, Mixed):
            if text is None:
                return (bounds.mixed_bound(part),), "bound"
            terms = [text(shape, piece) if isinstance(piece, str) else len(piece) for piece in part.pieces]
            return (*terms, part.overhead), "bound" if part.overhead else "engine"
        assert isinstance(part, Conversation)
        call = self._chat_call(shape, part)
        if call is not None:
            return (call,), "engine"
        if text is not None:
            written = bounds.conversation_text(part)
            return (text(shape, written), bounds.conversation_margin(part)), "bound"
        return (bounds.conversation_bound(part),), "bound"


def as_sent(shape: RequestShape) -> bytes:
    """The client's own body, for a counting endpoint that takes what the generating one takes."""
    return shape.body.text.encode("utf-8")


def read_number(name: str) -> Callable[[bytes], int]:
    """A reader of `{name: N}`."""

    def read(raw: bytes) -> int:
        try:
            value = json.loads(raw)[name]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise NoCount(f"no {name!r} in the answer") from None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise NoCount(f"{name!r} is not a count")
        return value

    return read


def read_length(name: str | None = None) -> Callable[[bytes], int]:
    """A reader of `{name: [...]}`, or of a bare list: its length."""

    def read(raw: bytes) -> int:
        try:
            value = json.loads(raw)
            value = value if name is None else value[name]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise NoCount(f"no {name or 'list'!r} in the answer") from None
        if not isinstance(value, list):
            raise NoCount(f"{name or 'the answer'!r} is not a list")
        return len(value)

    return read
