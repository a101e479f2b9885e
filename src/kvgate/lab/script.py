"""What one request can tell the scripted engine to do, the exact bytes of the answer, and the books
of what was asked. No I/O.

Promise: the same script and body give the same pieces every time.
"""

from __future__ import annotations

import base64
import functools
import itertools
import json
import random
from collections import deque
from dataclasses import dataclass, field, fields
from typing import Any

KEPT = 64  # requests remembered for /script/stats
KEPT_BYTES = 65536  # of each body
FILLER = "tök漢字😀 "  # 1-, 2-, 3- and 4-byte characters, so that random cuts fall inside some
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
COUNTING = ("/v1/chat/completions/input_tokens", "/tokenize")
ERROR_500 = b'{"error": {"message": "scripted failure \xe2\x80\x94 caf\xc3\xa9",  "code": 500}}\n'


@dataclass(frozen=True, slots=True)
class Script:
    """What one request wants of the engine. Every field may be left out."""

    chunks: int = 4
    interval_ms: float = 0.0
    chunk_bytes: int = 12
    split: int | None = None  # seed: cut the answer's bytes at random places
    fault: str | None = None  # *before_headers: hang, close; *mid: hang, close, reset_mid_chunk;
    #                           a status such as 500; ignore_disconnect (generates to its end)
    fault_after: int = 1  # chunks sent before a `*_mid` fault
    framing: str | None = None  # chunked | length | close; unset: chunked streams, else length
    trailers: bool = False
    raw: str | None = None  # base64: the exact response body
    connection_close: bool = False
    count_fault: str | None = None  # hang | 500 | close | bad_json
    prompt_tokens: int | None = None  # the answer of the counting endpoints

    @classmethod
    def parse(cls, text: bytes) -> Script:
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in json.loads(text).items() if k in known}) if text else cls()


def count(body: Any, path: str) -> int:
    """Roughly a quarter of the characters, but at least 1: cheap, and the same every time."""
    if path == "/tokenize":
        text = body.get("content", "")
        return len(text) if isinstance(text, list) else max(1, len(text) // 4)
    contents = [m.get("content") or "" for m in body.get("messages", [])]
    return max(1, sum(len(c) if isinstance(c, str) else len(json.dumps(c)) for c in contents) // 4)


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


@dataclass(slots=True)
class Books:
    """What the engine has seen, for /script/stats."""

    connections: int = 0
    requests: int = 0
    generations: int = 0
    counts: int = 0
    open: int = 0  # generations whose connection stands
    busy: int = 0  # generations that run, with or without a client
    max_concurrent: int = 0  # most of `busy` at one time
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT))

    def started(self) -> None:
        self.generations += 1
        self.open += 1
        self.busy += 1
        self.max_concurrent = max(self.max_concurrent, self.busy)

    def page(self) -> bytes:
        shown = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "recent"}
        recent = [{**r, "body": r["body"][:KEPT_BYTES].decode("utf-8", "replace")} for r in self.recent]
        return json.dumps({**shown, "recent": recent}).encode()


@dataclass(slots=True)
class Request:
    method: str = ""
    path: str = ""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""
    keep_alive: bool = True
    version: str = "1.1"

    def header(self, name: bytes) -> bytes:
        return next((v for k, v in self.headers if k.lower() == name), b"")
