"""What real client libraries do with the gate's refusals, each in its own environment (`make test-sdks`).

The refusals are rendered by the code that the gate uses. Nothing here is true of a version that was not
run: the figures in docs/clients.md are these.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from install import ENVIRONMENTS, python_of

sys.path.insert(0, str(Path(__file__).parents[1] / "edge"))
from scripted_server import CHAT_ANSWER, MESSAGE_ANSWER, Said, Server, serving

from kvgate.core.records import Reason, Refused
from kvgate.wire.refusal import render

pytestmark = pytest.mark.sdks
CALLER = Path(__file__).with_name("caller.py")
WITHIN = 120.0


@dataclass(frozen=True, slots=True)
class Library:
    """`reads_ms`: it knows `retry-after-ms`. `spread`: the most that it adds by itself, in seconds."""

    environment: str
    kind: str
    reads_ms: bool
    spread: float = 0.0

    @property
    def dialect(self) -> str:
        return "anthropic" if self.kind == "anthropic" else "openai"


LIBRARIES = [
    Library("openai-1", "openai", True),
    Library("openai-2", "openai", True),
    Library("openai-3", "openai", True),
    Library("anthropic-0", "anthropic", True),
    Library("anthropic-2", "anthropic", True),
    Library("litellm", "litellm", True),
    Library("urllib3", "urllib3", False),
    Library("httpx-retries", "httpx-retries", False),
]


def refusal(library: Library, reason: Reason = Reason.KV_CAPACITY, wait: float = 1.0) -> Said:
    refused = Refused(
        reason, retry_after=wait, prompt_tokens=71, needed_tokens=670, free_tokens=503, usable_tokens=1843,
        context=4096, output_cap=600, output_cap_was_set=True, output_cap_that_fits=433,
    )  # fmt: skip
    status, lines, body = render(refused, dialect=library.dialect)
    headers = dict(line.split(": ", 1) for line in lines.decode().strip().split("\r\n"))
    return Said(status, body, headers)


def good(library: Library) -> Said:
    return Said(200, MESSAGE_ANSWER if library.kind == "anthropic" else CHAT_ANSWER)


def call(library: Library, server: Server, mode: str = "count") -> dict[str, Any]:
    python = python_of(library.environment)
    assert python.exists(), "run `make test-sdks`, which installs the libraries first"
    done = subprocess.run(
        [str(python), str(CALLER), library.kind, server.url, mode],
        capture_output=True, text=True, timeout=WITHIN, check=True,
    )  # fmt: skip
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


@pytest.fixture(params=LIBRARIES, ids=lambda library: library.environment)
def library(request: pytest.FixtureRequest) -> Library:
    return request.param  # type: ignore[no-any-return]


def test_every_library_has_an_environment() -> None:
    assert {library.environment for library in LIBRARIES} == set(ENVIRONMENTS)


@pytest.mark.parametrize("wait", [1.0, 1.234, 30.0, 59.001, 60.0, 900.0])
def test_every_value_is_obeyed_as_it_is_meant(library: Library, wait: float) -> None:
    with serving(refusal(library, wait=wait), good(library)) as server:
        result = call(library, server)
    assert result["text"] == "hello", result
    told = refusal(library, wait=wait).headers
    meant = int(told["retry-after-ms"]) / 1000 if library.reads_ms else int(told["retry-after"])
    assert len(result["sleeps"]) == 1
    assert meant <= result["sleeps"][0] <= meant + library.spread + 0.001


def test_nobody_comes_back_before_the_moment(library: Library) -> None:
    with serving(refusal(library, wait=1.2), good(library)) as server:
        result = call(library, server, mode="real")
    assert result["text"] == "hello", result
    # A clock that counts whole milliseconds may be one short.
    assert server.gaps[0] >= 1.2 - 0.001


def test_the_user_sees_what_the_gate_says(library: Library) -> None:
    with serving(*[refusal(library)] * 8) as server:
        result = call(library, server)
    assert result["text"] is None
    assert "needs 670 tokens of KV cache" in result["error"]
    assert "433 or less" in result["error"]


@pytest.mark.parametrize("reason", [Reason.KV_CAPACITY_EXCEEDED, Reason.CONTEXT_LENGTH_EXCEEDED])
def test_what_never_fits_is_asked_once(library: Library, reason: Reason) -> None:
    with serving(*[refusal(library, reason)] * 8) as server:
        result = call(library, server)
    assert len(server.seen) == 1
    assert result["sleeps"] == []
    assert "prompt" in result["error"]
