"""What one request can tell the scripted engine to do, and the exact bytes of the answer. No I/O.

Promise: the same script and body give the same pieces every time.
"""

from __future__ import annotations

import base64
import functools
import itertools
import json
import random
from dataclasses import dataclass, fields, replace
from typing import Any

FILLER = "tök漢字😀 "  # 1-, 2-, 3- and 4-byte characters, so that random cuts fall inside some
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
OVERFLOW = (  # as llama.cpp says it, in the stream of each that dies
    b'data: {"error":{"code":500,"message":"Context size has been exceeded.","type":"server_error"}}\n\n'
)
ERROR_500 = b'{"error": {"message": "scripted failure \xe2\x80\x94 caf\xc3\xa9",  "code": 500}}\n'


@dataclass(frozen=True, slots=True)
class Script:
    """What one request wants of the engine. Every field may be left out."""

    chunks: int = 4
    interval_ms: float = 0.0
    first_delay_ms: float = 0.0  # before the head
    chunk_bytes: int = 12
    split: int | None = None  # seed: cut the answer's bytes at random places
    fault: str | None = None  # *before_headers: hang, close, reset; *mid: hang, close,
    #                           reset_mid_chunk; a status such as 500; ignore_disconnect
    #                           (generates to its end)
    fault_after: int = 1  # chunks sent before a `*_mid` fault; 0: right after the head
    framing: str | None = None  # chunked | length | close; unset: chunked streams, else length
    trailers: bool = False
    raw: str | None = None  # base64: the exact response body
    wire: tuple[str, ...] | None = None  # base64: the exact response, head included, piece by piece
    headers: tuple[tuple[str, str], ...] = ()  # more of them, for the response
    connection_close: bool = False
    close_idle_ms: float | None = None  # close the connection this long after a whole answer
    count_fault: str | None = None  # hang | 500 | 400 | close | bad_json
    prompt_tokens: int | None = None  # the answer of the counting endpoints
    obey_cap: bool = False  # generate no more chunks than the body's output cap

    @classmethod
    def parse(cls, text: bytes) -> Script:
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in json.loads(text).items() if k in known}) if text else cls()

    def capped(self, body: Any) -> Script:
        """Itself, or with fewer chunks where the body's output cap is to be obeyed."""
        caps = [body.get(name) for name in ("max_completion_tokens", "max_tokens")]
        cap = min([self.chunks, *(c for c in caps if isinstance(c, int))])
        return replace(self, chunks=cap) if self.obey_cap else self


@functools.lru_cache(maxsize=64)
def chunk_text(size: int) -> str:
    """Text of at most `size` bytes (at least one character)."""
    filler = FILLER * (size // len(FILLER.encode()) + 1)
    return filler.encode()[:size].decode("utf-8", "ignore") or "a"


@functools.lru_cache(maxsize=256)
def event(path: str, size: int, finish: str | None) -> bytes:
    text = "" if finish else chunk_text(size)
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    choice |= {"delta": {"content": text} if text else {}} if path == CHAT else {"text": text}
    kind = "chat.completion.chunk" if path == CHAT else "text_completion"
    shown = {"id": "scripted-1", "object": kind, "created": 1, "model": "scripted", "choices": [choice]}
    return b"data: " + json.dumps(shown, ensure_ascii=False).encode() + b"\n\n"


def answer_pieces(script: Script, body: Any, path: str) -> list[bytes]:
    """The response body, in the pieces in which it is generated."""
    stream = body.get("stream") is True
    if script.raw is not None:
        return cut(base64.b64decode(script.raw), script.chunks)
    prompt = script.prompt_tokens or 1
    usage = {"prompt_tokens": prompt, "completion_tokens": script.chunks}
    usage["total_tokens"] = sum(usage.values())
    if stream:
        pieces = [event(path, script.chunk_bytes, None)] * script.chunks + [event(path, 0, "stop")]
        if (body.get("stream_options") or {}).get("include_usage"):
            pieces.append(
                b"data: " + json.dumps({"id": "scripted-1", "choices": [], "usage": usage}).encode()
            )
            pieces[-1] += b"\n\n"
        return [*pieces, b"data: [DONE]\n\n"]
    text = chunk_text(script.chunk_bytes) * script.chunks
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
    choice |= {"message": {"role": "assistant", "content": text}} if path == CHAT else {"text": text}
    kind = "chat.completion" if path == CHAT else "text_completion"
    whole: dict[str, Any] = {"id": "scripted-1", "object": kind, "created": 1, "model": "scripted"}
    whole |= {"choices": [choice], "usage": usage}
    # In one piece, unless something is to go wrong between two.
    return cut(json.dumps(whole, ensure_ascii=False).encode(), script.chunks if script.fault else 1)


def cut(data: bytes, parts: int) -> list[bytes]:
    size = max(1, -(-len(data) // max(1, parts)))
    return [data[i : i + size] for i in range(0, len(data), size)] or [b""]


def random_cuts(data: bytes, seed: int) -> list[bytes]:
    """At most 40 pieces, cut anywhere: inside a character, a chunk header, a line end."""
    places = random.Random(seed).sample(range(1, len(data)), min(39, len(data) - 1)) if len(data) > 1 else []
    edges = [0, *sorted(places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]
