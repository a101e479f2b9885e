"""Heads of requests and responses: what is passed on, dropped and added."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvgate.edge.relay import heads
from kvgate.edge.relay.heads import Headers, request_head, response_head


def head(headers: list[tuple[bytes, bytes]], drop: frozenset[bytes] = frozenset()) -> bytes:
    return request_head(b"POST", b"/p?q=1", b"engine:80", headers, body_bytes=3, peer=b"192.0.2.7", drop=drop)


def test_the_engine_gets_its_own_host_and_the_length_that_is_sent() -> None:
    lines = head([(b"Host", b"gate"), (b"Content-Length", b"99"), (b"Expect", b"100-continue")])

    assert lines.startswith(b"POST /p?q=1 HTTP/1.1\r\nhost: engine:80\r\n")
    assert lines.count(b"ontent-length") == 1
    assert b"content-length: 3\r\n" in lines
    assert b"xpect" not in lines


def test_headers_of_one_connection_stay_on_it() -> None:
    lines = head(
        [
            (b"Connection", b"close, X-Mine"),
            (b"x-mine", b"1"),
            (b"Transfer-Encoding", b"chunked"),
            (b"Upgrade", b"h2c"),
            (b"Authorization", b"Bearer k"),
        ]
    )

    for gone in (b"x-mine", b"onnection", b"chunked", b"h2c"):
        assert gone not in lines
    assert b"Authorization: Bearer k\r\n" in lines


def test_the_way_of_a_request_is_added_to_not_replaced() -> None:
    lines = head([(b"X-Forwarded-For", b"198.51.100.1"), (b"Via", b"1.0 edge")])

    assert b"x-forwarded-for: 198.51.100.1, 192.0.2.7\r\n" in lines
    assert b"via: 1.0 edge, 1.1 kvgate\r\n" in lines


def test_what_a_client_claims_over_several_lines_stays_and_our_own_entry_is_the_last() -> None:
    lines = head(
        [(b"X-Forwarded-For", b"10.0.0.1"), (b"x-forwarded-for", b"192.0.2.7"), (b"Via", b"1.1 a, 1.1 b")]
    )

    assert lines.lower().count(b"x-forwarded-for") == 1
    assert b"x-forwarded-for: 10.0.0.1, 192.0.2.7, 192.0.2.7\r\n" in lines
    assert b"via: 1.1 a, 1.1 b, 1.1 kvgate\r\n" in lines


def test_a_client_cannot_drop_our_entry_by_naming_it_in_connection() -> None:
    lines = head([(b"Connection", b"x-forwarded-for, via"), (b"X-Forwarded-For", b"10.0.0.1")])

    assert b"x-forwarded-for: 10.0.0.1, 192.0.2.7\r\n" in lines
    assert b"via: 1.1 kvgate\r\n" in lines


def test_a_header_that_would_defeat_the_gate_is_dropped() -> None:
    assert b"abc" not in head([(b"X-Conversation-Id", b"abc")], frozenset({b"x-conversation-id"}))


def test_an_event_stream_is_never_to_be_buffered() -> None:
    lines = response_head(
        200, b"OK", [(b"Content-Type", b"text/event-stream"), (b"X-Accel-Buffering", b"yes")], b"", b""
    )

    assert lines.lower().count(b"x-accel-buffering") == 1
    assert b"x-accel-buffering: no\r\n" in lines


def test_a_plain_answer_gets_nothing_but_what_is_added() -> None:
    assert (
        response_head(200, b"OK", [(b"A", b"b"), (b"Connection", b"keep-alive")], b"f: 1\r\n", b"x: 2\r\n")
        == b"HTTP/1.1 200 OK\r\nA: b\r\nf: 1\r\nx: 2\r\n\r\n"
    )


NAMES = st.sampled_from(
    [b"a", b"A", b"x-%b", b"Connection", b"connection", b"Via", b"X-Forwarded-For", b"TE", b"host", b"named"]
)
VALUES = st.sampled_from([b"", b"v", b"%d", b"keep-alive", b"Close", b"named", b"keep-alive, a", b"te"])
DROPS = st.sampled_from([frozenset[bytes](), frozenset({b"a"}), frozenset({b"x-%b", b"named"})])


@given(st.lists(st.tuples(NAMES, VALUES), max_size=6), DROPS)
def test_a_remembered_form_writes_what_a_look_at_each_line_writes(
    headers: Headers, drop: frozenset[bytes]
) -> None:
    dropped = heads._REMADE | drop
    expected = heads._looked_at(headers, dropped)
    assert heads._relayed(headers, dropped) == expected
    assert heads._relayed(headers, dropped, heads.named(headers)) == expected


@given(st.integers(0, 200), st.integers(0, 200))
def test_names_that_are_many_or_long_are_not_kept(count: int, length: int) -> None:
    headers = [(b"n%d" % index + b"x" * length, b"v") for index in range(count)]
    heads._remembered.cache_clear()
    names, values = heads.named(headers)
    assert names.size == sum(len(name) for name, _ in headers)
    assert len(values) == count
    kept = count <= 64 and names.size <= 2048
    assert heads._remembered.cache_info().currsize == kept
