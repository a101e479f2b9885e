"""What one client of a chaos run does, drawn from its seed: what it asks, what the engine is told to do
wrong, and when the client leaves. No I/O.

Every knob has an "off", and most requests are calm: a fault that is always on hides what happens
without it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random
from typing import Any

CHAT = "/v1/chat/completions"
BLOCK_SIZE = 16
CONTEXT = 4096

# What the engine is told; "" is a calm answer. Each names a `Script` field's value or values.
FAULTS: dict[str, dict[str, Any]] = {
    "hang before headers": {"fault": "hang_before_headers"},
    "close before headers": {"fault": "close_before_headers"},
    "reset before headers": {"fault": "reset_before_headers"},
    "closes when idle": {"close_idle_ms": 1},
    "slow head": {"first_delay_ms": 900},
    "answers garbage": {"wire": ["AP8gaXMgbm90IEhUVFANCg0K"]},
    "hang mid answer": {"fault": "hang_mid"},
    "close mid answer": {"fault": "close_mid"},
    "reset mid chunk": {"fault": "reset_mid_chunk"},
    "status 500": {"fault": "500"},
    "status 503": {"fault": "503"},
    "ignores disconnects": {"fault": "ignore_disconnect"},
    "count hangs": {"count_fault": "hang"},
    "count fails": {"count_fault": "500"},
    "count is cut": {"count_fault": "close"},
    "count is garbage": {"count_fault": "bad_json"},
    "not an event stream": {"raw": "AP8NCg0KZGF0YQ=="},
}
# When the client leaves. "never" stays to the end.
LEAVES = (
    *("connected", "half a head", "half a body", "sent", "soon", "later", "head", "chunk", "last"),
    "half-closed",
)
ODD = ("bad body", "unpriced", "no such route", "not http", "too long a prompt", "free")


@dataclass(frozen=True, slots=True)
class Plan:
    """One request. Times in seconds."""

    fault: str = ""
    leave: str = "never"
    odd: str = ""
    stream: bool = True
    prompt: int = 10
    cap: int | None = 64
    chunks: int = 8
    script: dict[str, Any] = field(default_factory=dict)
    delay: float = 0.0  # before a "soon" or "later" leave
    leave_after: int = 0  # chunks, before a "chunk" leave
    is_reset: bool = False  # leaves with RST instead of FIN
    stall: float = 0.0  # stops reading for so long, in the middle
    pause: float = 0.0  # before the next request
    is_reused: bool = False  # keeps its connection for the next request

    @property
    def is_calm(self) -> bool:
        """Nothing is meant to go wrong: the answer is whole, or an honest refusal."""
        return not self.fault and not self.odd and self.leave == "never"

    @property
    def generated(self) -> int:
        """Chunks of a whole answer: the engine obeys the cap."""
        return self.chunks if self.cap is None else min(self.chunks, self.cap)

    @property
    def blocks(self) -> int:
        """What the request costs, reckoned apart from the core: positions that are stored, paged."""
        cap = min(CONTEXT - self.prompt, CONTEXT if self.cap is None else self.cap)
        return len(range(0, self.prompt + cap - 1, BLOCK_SIZE))

    def describe(self) -> str:
        parts = (self.odd, self.fault, "" if self.leave == "never" else f"leaves: {self.leave}")
        stalls = "reads slowly" if self.stall else ""
        return ", ".join(part for part in (*parts, stalls) if part) or "calm"


def draw(rng: Random) -> Plan:
    """The next request of one client."""
    chunks = rng.choice((1, 20, 60, rng.randint(1, 150)))
    interval_ms = rng.choice((5, 20, 50))
    odd = rng.choice(ODD) if rng.random() < 0.04 else ""
    fault = rng.choice(sorted(FAULTS)) if not odd and rng.random() < 0.25 else ""
    leave = rng.choice(LEAVES) if not odd and rng.random() < 0.35 else "never"
    stall = rng.uniform(0.2, 1.0) if rng.random() < 0.08 else 0.0
    if fault == "ignores disconnects":
        # The gate waits for the abort grace and no longer, so what goes on is shorter than that.
        chunks, interval_ms = min(chunks, 15), min(interval_ms, 20)
    prompt = rng.choice((1, 10, 100, rng.randint(1, 1000)))
    script: dict[str, Any] = {
        "chunks": chunks,
        "obey_cap": True,
        "interval_ms": interval_ms,
        "chunk_bytes": 16384 if stall else rng.choice((4, 12, 200)),
        "prompt_tokens": CONTEXT if odd == "too long a prompt" else prompt,
        "fault_after": rng.randint(0, chunks),
    }
    if rng.random() < 0.1:
        script["split"] = rng.randrange(1 << 16)
    if rng.random() < 0.1:
        script["framing"] = rng.choice(("chunked", "close"))
    if rng.random() < 0.1:
        script["connection_close"] = True
    return Plan(
        fault=fault,
        leave=leave,
        odd=odd,
        stream=rng.random() < 0.85,
        prompt=prompt,
        cap=rng.choice((16, 64, 256, rng.randint(1, 2000), None if rng.random() < 0.1 else 128)),
        chunks=chunks,
        script=script | FAULTS.get(fault, {}),
        delay=rng.uniform(0.0, 0.03) if leave == "soon" else rng.uniform(0.03, 1.5),
        leave_after=rng.randint(1, max(1, chunks)),
        is_reset=rng.random() < 0.3,
        stall=stall,
        pause=rng.choice((0.0, 0.0, rng.uniform(0.0, 0.3))),
        is_reused=rng.random() < 0.5,
    )


def request(plan: Plan) -> tuple[bytes, bytes]:
    """Head and body, as they are sent."""
    body: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}]}
    body["stream"] = plan.stream
    if plan.cap is not None:
        body["max_tokens"] = plan.cap
    data, path, method = json.dumps(body).encode(), CHAT, "POST"
    if plan.odd == "bad body":
        data = data[:-1]
    elif plan.odd == "unpriced":
        path = "/v1/engines/generate"
    elif plan.odd == "no such route":
        path = "/nowhere"
    elif plan.odd == "free":
        path, method, data = "/v1/models", "GET", b""
    elif plan.odd == "not http":
        return b"\x16\x03\x01 is not a request\r\n\r\n", b""
    lines = [f"{method} {path} HTTP/1.1", "host: chaos.test", f"x-script: {json.dumps(plan.script)}"]
    if method == "POST":
        lines += ["content-type: application/json", f"content-length: {len(data)}"]
    return "\r\n".join([*lines, "", ""]).encode(), data
