"""What a request of any API asks for, in one record.

Promise: a request with this shape can make the engine hold no more than its parts, its choices and
its cap say, once `enforce` has written the cap; where the gate cannot see the prompt, the shape says
so and is priced as a whole context. No shape is without a part.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvgate.core.record import record
from kvgate.wire.body import Body, Path


class Api(enum.StrEnum):
    """The API that a body was written for."""

    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSES = "responses"
    POOLING = "pooling"
    MESSAGES = "messages"
    VLLM = "vllm"
    SGLANG = "sglang"
    LLAMACPP = "llamacpp"
    LMDEPLOY = "lmdeploy"
    TGI = "tgi"
    OLLAMA = "ollama"


class StreamKind(enum.StrEnum):
    """How the answer comes: at once, as server-sent events, or as one JSON object a line."""

    NONE = "none"
    SSE = "sse"
    NDJSON = "ndjson"


@dataclass(frozen=True, slots=True)
class Mixed:
    """One prompt of several pieces, texts and token ids. Counted piece by piece.

    `overhead`: tokens that the engine may put between the pieces.
    """

    pieces: tuple[str | list[int], ...]
    overhead: int = 0


@record
class Conversation:
    """One prompt that the engine's chat template writes.

    `messages` and `tools` are in OpenAI's chat form, whatever API they came in. `options` holds the
    other fields that a template sees. `media` counts images, audio and the like.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    media: int = 0


@dataclass(frozen=True, slots=True)
class Unseen:
    """A prompt that the body does not show; `why` is for the explanation."""

    why: str


Part: TypeAlias = str | list[int] | Mixed | Conversation | Unseen


@record
class CapPlace:
    """A place in the body for the cap; `own` is what stood there, or the engine's default."""

    path: Path
    own: int | None = None


@dataclass(slots=True)  # not frozen: that makes 13 fields cost 0.8 us on each request
class RequestShape:
    """What a request asks for. Nobody changes it.

    `is_chat`: the prompts are conversations. `prompts`: those parts that are texts or token ids.
    `output_cap`: what the client set (None: nothing); `default_cap`: what this endpoint allows when
    nothing is set (None: the rest of the context). `choices`: sequences for each part.
    """

    body: Body
    is_chat: bool
    prompts: tuple[str | list[int], ...]
    output_cap: int | None
    choices: int
    stream: bool
    api: Api = Api.CHAT
    parts: tuple[Part, ...] = ()
    default_cap: int | None = None
    cap_places: tuple[CapPlace, ...] = ()
    model: str | None = None
    stream_kind: StreamKind = StreamKind.NONE
    generates: bool = True

    @property
    def sequences(self) -> int:
        return self.choices * max(1, len(self.parts))

    @property
    def unseen(self) -> str | None:
        """Why the prompt cannot be known, or None."""
        return next((part.why for part in self.parts if isinstance(part, Unseen)), None)

    @property
    def priced_as_whole_context(self) -> bool:
        return self.unseen is not None

    @property
    def media(self) -> int:
        """Images, audio and the like in all parts."""
        return sum(part.media for part in self.parts if isinstance(part, Conversation))

    @property
    def effective_cap(self) -> int | None:
        """What the client may get: its own cap, else the endpoint's default."""
        return self.output_cap if self.output_cap is not None else self.default_cap


def enforce(shape: RequestShape, output_cap: int, *, context: int | None = None) -> bytes:
    """The body to forward: no place for a cap in it allows more than `output_cap`.

    A place where the client set less keeps it. With `context` given, a cap that reaches to the end
    of it is not written where the client set none: the engine stops there by itself, and some
    refuse a prompt and a cap that together are longer.
    """
    reaches_end = context is not None and output_cap >= context - 1
    new: dict[Path, int] = {}
    for place in shape.cap_places:
        if place.own is None and reaches_end:
            continue
        cap = output_cap if place.own is None else min(place.own, output_cap)
        if shape.body.at(place.path) != cap:
            new[place.path] = cap
    return shape.body.replaced(new) if new else shape.body.raw


def whole_context(shape: RequestShape, context: int, requested: int | None) -> tuple[int, ...]:
    """Prompt tokens that make each sequence cost the whole `context` under the cap `requested`.

    For a shape that is `priced_as_whole_context`: whatever its prompt is, prompt and answer together
    stay inside the context, so this price is never too low.
    """
    cap = context - 1 if requested is None else max(1, min(requested, context - 1))
    return (context - cap,) * len(shape.parts)
