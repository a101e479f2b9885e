"""Many streams at once, and what became of each: the load of the demo, the tests and the benchmarks.

Promises: the clients behave as good ones do (a refusal is retried at the moment that it names,
`retry-after-ms` before `Retry-After`, and never when told not to); an answer counts as whole only
with a finish reason and `[DONE]`; a token that was delivered in an answer that died is counted as
thrown away.
"""

from __future__ import annotations

import asyncio
import enum
import json
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvgate.lab.sse_client import Answer, Cut, post


class Outcome(enum.StrEnum):
    """What became of a stream. `RUNNING` only while the storm lasts."""

    RUNNING = "running"
    FINISHED = "finished"
    DIED = "died"  # the engine had taken it, and it did not come to its end
    REFUSED = "refused"  # refused for good, or refused until patience ran out
    LEFT = "left"  # its client hung up, or the storm was over before it


@dataclass(frozen=True, slots=True)
class Wanted:
    """One stream to ask for. `max_tokens` None: unset."""

    prompt: str
    max_tokens: int | None = None

    def body(self) -> bytes:
        fields: dict[str, Any] = {
            "messages": [{"role": "user", "content": self.prompt}],
            "stream": True,
            "stream_options": {"include_usage": True},
            # Long answers do happen; with this they always do, so that the worst case is tested.
            "ignore_eos": True,
        }
        if self.max_tokens is not None:
            fields["max_tokens"] = self.max_tokens
        return json.dumps(fields).encode()


@dataclass(slots=True)
class StreamResult:
    """One stream: how it ended and what the client saw on the way."""

    outcome: Outcome = Outcome.RUNNING
    tokens: int = 0
    refusals: int = 0
    retries: int = 0
    longest_stall: float = 0.0
    seconds_to_first_token: float | None = None  # from the attempt that was let in
    seconds: float = 0.0
    detail: str = ""
    gaps: array[float] = field(default_factory=lambda: array("f"))  # seconds between its tokens


@dataclass(slots=True)
class StormResult:
    """The figures of one storm; also the running state that a progress callback reads."""

    streams: list[StreamResult] = field(default_factory=list)
    seconds: float = 0.0

    def count(self, outcome: Outcome) -> int:
        return sum(stream.outcome is outcome for stream in self.streams)

    @property
    def finished(self) -> int:
        return self.count(Outcome.FINISHED)

    @property
    def died(self) -> int:
        return self.count(Outcome.DIED)

    @property
    def refused(self) -> int:
        return self.count(Outcome.REFUSED)

    @property
    def refusals(self) -> int:
        return sum(stream.refusals for stream in self.streams)

    @property
    def retries(self) -> int:
        return sum(stream.retries for stream in self.streams)

    @property
    def tokens(self) -> int:
        return sum(stream.tokens for stream in self.streams)

    @property
    def tokens_whole(self) -> int:
        return sum(stream.tokens for stream in self.streams if stream.outcome is Outcome.FINISHED)

    @property
    def tokens_thrown_away(self) -> int:
        return sum(stream.tokens for stream in self.streams if stream.outcome is Outcome.DIED)

    @property
    def longest_stall(self) -> float:
        return max((stream.longest_stall for stream in self.streams), default=0.0)

    @property
    def slowest_first_token(self) -> float:
        return max((stream.seconds_to_first_token or 0.0 for stream in self.streams), default=0.0)

    def as_dict(self) -> dict[str, Any]:
        return {
            "streams": len(self.streams),
            "died": self.died,
            "finished": self.finished,
            "refused": self.refused,
            "refusals": self.refusals,
            "retries": self.retries,
            "tokens_whole": self.tokens_whole,
            "tokens_thrown_away": self.tokens_thrown_away,
            "longest_stall_seconds": round(self.longest_stall, 3),
            "slowest_first_token_seconds": round(self.slowest_first_token, 3),
            "wall_seconds": round(self.seconds, 3),
            "deaths": sorted({stream.detail for stream in self.streams if stream.outcome is Outcome.DIED}),
        }


Progress = Callable[[StormResult], None]


async def storm(
    url: str,
    wanted: Sequence[Wanted],
    *,
    patience: float = 180.0,
    path: str = "/v1/chat/completions",
    progress: Progress | None = None,
    progress_every: float = 0.1,
) -> StormResult:
    """Ask for all of `wanted` at once and follow each to its end.

    `patience`: seconds after which a client that is still being refused gives up.
    """
    result = StormResult([StreamResult() for _ in wanted])
    started = time.perf_counter()

    async def report() -> None:
        while progress is not None:
            result.seconds = time.perf_counter() - started
            progress(result)
            await asyncio.sleep(progress_every)

    reporter = asyncio.create_task(report())
    try:
        async with asyncio.TaskGroup() as group:
            for want, stream in zip(wanted, result.streams, strict=True):
                group.create_task(_follow(url + path, want, stream, started + patience))
    finally:
        reporter.cancel()
    result.seconds = time.perf_counter() - started
    if progress is not None:
        progress(result)
    return result


async def _follow(url: str, want: Wanted, stream: StreamResult, give_up: float) -> None:
    """One client: ask, and ask again when told to, until there is an outcome."""
    started = time.perf_counter()
    try:
        while True:
            reader = TokenReader(stream)
            try:
                answer = await post(url, want.body(), reader.event)
            except (Cut, OSError) as error:
                stream.outcome, stream.detail = Outcome.DIED, f"cut: {error}"
                return
            if answer.status == 200:
                stream.outcome, stream.detail = reader.verdict()
                return
            wait = retry_after(answer)
            if wait is None and not 400 <= answer.status < 500:
                # The engine had taken it and failed before the first token.
                stream.outcome, stream.detail = Outcome.DIED, f"{answer.status}: {message_of(answer)}"
                return
            stream.refusals += 1
            if wait is None or time.perf_counter() + wait > give_up:
                stream.outcome, stream.detail = Outcome.REFUSED, f"{answer.status}: {message_of(answer)}"
                return
            await asyncio.sleep(wait)
            stream.retries += 1
    finally:
        stream.seconds = time.perf_counter() - started


def retry_after(answer: Answer) -> float | None:
    """Seconds until the client should ask again; None where it should not."""
    if answer.headers.get("x-should-retry") == "false":
        return None
    for name, scale in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            return max(0.0, float(answer.headers[name]) / scale)
        except (KeyError, ValueError):
            continue
    return None


class TokenReader:
    """Reads the events of one streamed answer into its StreamResult."""

    def __init__(self, stream: StreamResult) -> None:
        self._stream = stream
        self._asked = time.perf_counter()
        self._last: float | None = None
        self._finish_reason: str | None = None
        self._done = False
        self._error: str | None = None

    def event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            self._error = self._error or "an event that is not JSON"
            return
        if "error" in event:
            self._error = str(event["error"].get("message", event["error"]))
            self._gap()
        for choice in event.get("choices") or ():
            if (choice.get("delta") or {}).get("content"):
                self._gap()
                self._stream.tokens += 1
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
        if usage := event.get("usage"):
            # The engine's own count; an event may carry more than one token.
            self._stream.tokens = usage["completion_tokens"]

    def verdict(self) -> tuple[Outcome, str]:
        if self._error is not None:
            return Outcome.DIED, self._error
        if self._finish_reason is None or not self._done:
            return Outcome.DIED, "the stream ended without a finish reason or [DONE]"
        return Outcome.FINISHED, self._finish_reason

    def _gap(self) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self._stream.longest_stall = max(self._stream.longest_stall, now - self._last)
            self._stream.gaps.append(now - self._last)
        elif self._stream.seconds_to_first_token is None:
            self._stream.seconds_to_first_token = now - self._asked
        self._last = now


def message_of(answer: Answer) -> str:
    try:
        return str(json.loads(answer.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.body[:200].decode("utf-8", "replace")
