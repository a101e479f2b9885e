"""Usage is asked for where its event can be taken out again, and nowhere else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvgate.edge.relay.watch import Watch, watch_for
from kvgate.wire.dialects.openai import enforce, read_chat
from kvgate.wire.dialects.shape import Api
from kvgate.wire.sse import TIMINGS, USAGE

OWN, ASKED, TIMED = Watch(USAGE), Watch(USAGE, strips=True), Watch(TIMINGS)
STREAM = {"stream": True}


@pytest.mark.parametrize(
    ("engine", "fields", "may_ask", "expected"),
    [
        ("vllm", STREAM, True, ASKED),
        ("sglang", STREAM, True, ASKED),
        ("vllm", STREAM, False, OWN),
        ("vllm", {}, True, OWN),
        ("vllm", STREAM | {"stream_options": {"include_usage": True}}, True, OWN),
        ("vllm", STREAM | {"stream_options": {"include_usage": False}}, True, ASKED),
        ("vllm", STREAM | {"stream_options": {"continuous_usage_stats": True}}, True, OWN),
        ("llamacpp", STREAM, True, TIMED),
        ("llamacpp", STREAM | {"stream_options": {"include_usage": True}}, True, OWN),
        ("generic", STREAM, True, OWN),
    ],
)
def test_each_engine_is_asked_in_the_way_that_changes_nothing_for_the_client(
    engine: str, fields: dict[str, Any], may_ask: bool, expected: Watch
) -> None:
    wanted = {"messages": [{"role": "user", "content": "{}"}], "max_tokens": 5} | fields
    shape = read_chat(json.dumps(wanted).encode())
    body = enforce(shape, 5)
    sent, watch = watch_for(body, shape, engine, may_ask=may_ask)
    assert watch == expected
    if expected is ASKED:
        options = fields.get("stream_options", {}) | {"include_usage": True}
        assert json.loads(sent) == json.loads(body) | {"stream_options": options}
    else:
        assert sent is body


def test_an_api_without_stream_options_is_not_sent_any() -> None:
    shape = read_chat(b'{"messages": [{"role": "user", "content": "x"}], "stream": true}')
    object.__setattr__(shape, "api", Api.MESSAGES)
    assert watch_for(b"{}", shape, "vllm", may_ask=True) == (b"{}", OWN)
