"""A stream is watched without being changed; one event is taken out; usage is read where it stands."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.wire.body import Body
from kvgate.wire.sse import (
    LINE_BYTES_MAX,
    TIMINGS,
    USAGE,
    EventStream,
    Usage,
    ask_usage,
    error_event,
    usage_at_end,
)

USED = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
DONE = b"data: [DONE]\n\n"


def event(*, compact: bool = True, **fields: Any) -> bytes:
    separators = (",", ":") if compact else None
    return b"data: " + json.dumps({"id": "x", **fields}, separators=separators).encode() + b"\n\n"


TEXT = event(choices=[{"index": 0, "delta": {"content": "hi"}}])
OURS = event(choices=[], usage=USED)

# What real streams are made of, with what only looks like usage.
PARTS = st.sampled_from(
    [
        TEXT,
        TEXT.replace(b"\n", b"\r\n"),
        event(compact=False, choices=[{"index": 0, "text": "a"}]),
        event(choices=[{"index": 0, "delta": {}}], usage=None),
        event(choices=[{"index": 0, "delta": {"content": '{"usage": {"prompt_tokens": 1}}'}}]),
        event(choices=[{"index": 0, "logprobs": {"content": [{"token": "usage"}]}}]),
        event(choices=[], prompt_filter_results=[]),
        b": keep-alive\n\n",
        b":\n",
        b"event: ping\nid: 3\nretry: 10\n\n",
        "data: 漢字😀\n\n".encode(),
    ]
)
OURS_AS_SENT = st.sampled_from(
    [
        OURS,
        OURS.replace(b"\n", b"\r\n"),
        event(compact=False, choices=[], usage=USED),
        b"data:" + OURS[6:],
        event(usage=USED, choices=[], object="chat.completion.chunk"),
    ]
)
PLACES = st.lists(st.integers(0, 5000), max_size=12)


def pieces(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@given(st.lists(PARTS, max_size=6), st.lists(PARTS, max_size=2), OURS_AS_SENT, PLACES)
def test_only_the_event_that_the_gate_asked_for_is_taken_out(
    before: list[bytes], after: list[bytes], ours: bytes, places: list[int]
) -> None:
    stream = EventStream(strips=True)
    whole = b"".join([*before, ours, *after, DONE])
    seen = b"".join(map(stream.feed, pieces(whole, places))) + stream.end()
    assert seen == b"".join([*before, *after, DONE])
    assert stream.usage == Usage(7, 5)


@given(st.lists(PARTS | OURS_AS_SENT, max_size=8), st.binary(max_size=20), PLACES)
def test_nothing_is_changed_where_the_client_asked_itself(
    parts: list[bytes], rest: bytes, places: list[int]
) -> None:
    stream = EventStream()
    whole = b"".join(parts) + rest
    assert b"".join(map(stream.feed, pieces(whole, places))) + stream.end() == whole


@given(st.lists(PARTS, max_size=6), PLACES, st.integers(0, 2000))
def test_what_is_passed_on_ends_with_a_line_and_a_break_leaves_nothing_torn(
    parts: list[bytes], places: list[int], at: int
) -> None:
    whole = b"".join(parts)[:at]
    stream = EventStream(strips=True)
    seen = b"".join(map(stream.feed, pieces(whole, places)))
    assert seen == whole[: whole.rfind(b"\n") + 1]
    assert stream.break_off(error_event(b"{}")).endswith(b"\ndata: {}\n\n")


def test_a_very_long_line_is_passed_on_in_parts_and_is_ended_where_the_stream_breaks() -> None:
    stream = EventStream()
    long = b"data: " + b"x" * LINE_BYTES_MAX
    assert stream.feed(long) == long
    assert not stream.is_at_line_end
    assert stream.feed(b"more") == b"more"
    assert stream.break_off(error_event(b"{}")) == b"\n\ndata: {}\n\n"
    assert stream.feed(b"end\n\nnext") == b"end\n\n"
    assert stream.feed(b"\n") == b"next\n"
    assert stream.is_at_line_end


def test_the_empty_line_of_the_event_that_is_taken_out_goes_with_it_when_it_comes_late() -> None:
    stream = EventStream(strips=True)
    assert stream.feed(TEXT + OURS[:-1]) == TEXT
    assert not stream.is_at_line_end
    assert stream.feed(b"\n" + DONE) == DONE
    assert stream.is_at_line_end


def test_an_event_with_usage_and_choices_stays() -> None:
    last = event(choices=[{"index": 0, "finish_reason": "stop"}], usage=USED)
    stream = EventStream(strips=True)
    assert stream.feed(last) == last
    assert stream.usage == Usage(7, 5)


def test_usage_on_every_event_is_read_from_the_latest() -> None:
    stream = EventStream()
    for new in range(1, 4):
        stream.feed(event(choices=[{"index": 0}], usage={"prompt_tokens": 7, "completion_tokens": new}))
    assert stream.usage == Usage(7, 3)


@pytest.mark.parametrize(
    ("mark", "line", "expected"),
    [
        (
            USAGE,
            b'data: {"type":"response.completed","response":{"usage":{"input_tokens":3,"output_tokens":4}}}',
            7,
        ),
        (USAGE, b'data: {"usage": {"prompt_tokens": 3}}', 3),
        (TIMINGS, b'data: {"choices":[{}],"timings":{"cache_n":2,"prompt_n":3,"predicted_n":4}}', 9),
        (TIMINGS, b'data: {"choices":[{}],"timings":{"prompt_n":3,"predicted_n":4}}', None),
        (USAGE, b'data: {"usage":{"prompt_tokens":true,"completion_tokens":1}}', None),
        (USAGE, b'data: {"usage":{"prompt_tokens":-1,"completion_tokens":1}}', None),
        (USAGE, b'data: {"usage":{"output_tokens":9}}', None),
        (USAGE, b'data: {"usage":{"prompt_tokens":', None),
    ],
)
def test_figures_are_read_under_the_names_of_each_api_or_not_at_all(
    mark: bytes, line: bytes, expected: int | None
) -> None:
    stream = EventStream(mark=mark)
    assert stream.feed(line + b"\n\n") == line + b"\n\n"
    assert (stream.usage.total if stream.usage else None) == expected


def test_the_usage_of_a_whole_answer_is_read_from_its_end() -> None:
    text = '{"usage": {"prompt_tokens": 99, "completion_tokens": 99}}'
    whole = {"choices": [{"message": {"content": text}}], "usage": USED, "system_fingerprint": "usage"}
    for indent in (None, 2):
        assert usage_at_end(json.dumps(whole, indent=indent).encode()[-200:]) == Usage(7, 5)
    assert usage_at_end(json.dumps({"choices": [{"text": text}]}).encode()) is None
    assert usage_at_end(b'"usage": {"prompt_tokens": ' + b"[" * 100_000) is None


@given(st.binary(max_size=200))
def test_no_bytes_make_it_fail(data: bytes) -> None:
    stream = EventStream(strips=True)
    out = stream.feed(data + b'"usage":{') + stream.end()
    assert out == data + b'"usage":{'
    assert stream.usage is None
    usage_at_end(data)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (..., {"include_usage": True}),
        (None, {"include_usage": True}),
        ({}, {"include_usage": True}),
        ({"include_usage": False, "other": [1]}, {"include_usage": True, "other": [1]}),
        ({"include_usage": True}, None),
        ({"continuous_usage_stats": True}, None),
        ("yes", None),
    ],
)
def test_usage_is_asked_for_where_that_changes_one_event_only(
    options: Any, expected: dict[str, Any] | None
) -> None:
    fields = {"model": "m", "stream": True} | ({} if options is ... else {"stream_options": options})
    raw = json.dumps(fields).encode()
    asked = ask_usage(raw, Body(raw).fields)
    if expected is None:
        assert asked is None
    else:
        assert asked is not None
        assert json.loads(asked) == fields | {"stream_options": expected}
        assert len(Body(asked).fields) == len(fields | {"stream_options": 0})  # no key twice
