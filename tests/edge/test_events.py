"""Raw chunks in, raw chunks out: whole at every moment, so that an error can always be added."""

from __future__ import annotations

from itertools import pairwise

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.edge.relay.events import EventReply, is_event_stream
from kvgate.wire.chunks import LAST_CHUNK, frame
from kvgate.wire.sse import EventStream, Usage

TEXT = b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n'
NULL = b'data: {"choices":[{"delta":{"content":"hi"}}],"usage":null}\n\n'
OURS = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5}}\n\n'
CRLF = TEXT.replace(b"\n", b"\r\n")
DONE = b"data: [DONE]\n\n"
ERROR = b'{"error":{"code":"engine_unavailable"}}'
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]

EVENTS = st.lists(
    st.sampled_from([TEXT, NULL, CRLF, b": ping\n\n", b"data: " + b"y" * 20_000 + b"\n\n"]), max_size=6
)
PLACES = st.lists(st.integers(0, 200_000), max_size=10)


class Read:
    """What a client makes of the bytes."""

    def __init__(self, raw: bytes) -> None:
        self.body, self.is_whole, self.trailers = b"", False, 0
        self._headers_done = False
        parser = httptools.HttpResponseParser(self)
        parser.feed_data(raw)

    def on_headers_complete(self) -> None:
        self._headers_done = True

    def on_header(self, name: bytes, value: bytes) -> None:
        self.trailers += self._headers_done

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.is_whole = True


def reply(framing: str = "chunked", *, is_http11: bool = True, strips: bool = True) -> EventReply:
    return EventReply(
        200, b"OK", HEADERS, framing, added=b"", is_http11=is_http11, keep_alive=True,
        events=EventStream(strips=strips),
    )  # fmt: skip


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@given(EVENTS, PLACES, PLACES, st.booleans())
def test_a_chunked_stream_arrives_whole_without_the_event_of_the_gate(
    events: list[bytes], chunks: list[int], places: list[int], trailers: bool
) -> None:
    content = b"".join([*events, OURS, DONE])
    ending = b"0\r\nx-trailer: yes\r\n\r\n" if trailers else LAST_CHUNK
    raw = b"".join(map(frame, cut(content, chunks))) + ending
    form = reply()
    begun = form.piece(b"")
    pieces = [piece if form.is_usual(piece) else form.piece(piece) for piece in cut(raw, places)]
    read = Read(begun + b"".join(pieces) + form.end())
    assert read.body == b"".join([*events, DONE])
    assert read.is_whole
    assert read.trailers == trailers
    assert form.usage == Usage(7, 5)


@given(
    EVENTS, PLACES, st.integers(0, 100_000), st.integers(0, 100_000), st.sampled_from(["chunked", "close"])
)
def test_a_stream_that_breaks_anywhere_ends_with_the_error_event_and_the_last_chunk(
    events: list[bytes], chunks: list[int], first: int, breaks_at: int, framing: str
) -> None:
    content = b"".join(events) + TEXT
    raw = b"".join(map(frame, cut(content, chunks))) if framing == "chunked" else content
    raw = raw[: breaks_at % len(raw)]
    form = reply(framing)
    read = Read(b"".join(map(form.piece, cut(raw, [first]))) + form.broken(ERROR))
    assert read.is_whole
    seen, end, rest = read.body.partition(b"\ndata: " + ERROR + b"\n\n")
    assert (end != b"", rest) == (True, b"")
    # Either whole lines, or a very long line that is out in part and ended here.
    assert content.startswith(seen) or (len(seen) > 16_000 and content.startswith(seen[:-1]))
    assert b"[DONE]" not in read.body


class Judge:
    """What llhttp makes of an answer, as far as it has been shown it."""

    def __init__(self) -> None:
        self.is_whole = self.is_broken = False
        self._parser = httptools.HttpResponseParser(self)
        self.see(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")

    def on_message_complete(self) -> None:
        self.is_whole = True

    def see(self, piece: bytes) -> tuple[bool, bool]:
        if not self.is_broken:
            try:
                self._parser.feed_data(piece)
            except httptools.HttpParserError:
                self.is_broken = True
        return self.is_whole, self.is_broken


@given(
    EVENTS, st.integers(0, 100_000), st.sampled_from([b"", b"\0", b"\n", b"g", b"0", b"\r\n"]), st.booleans()
)
def test_a_parser_that_is_not_shown_usual_pieces_judges_the_others_as_one_that_sees_all(
    events: list[bytes], place: int, damage: bytes, ends: bool
) -> None:
    pieces = [frame(event) for event in [*events, TEXT, TEXT, DONE]] + [LAST_CHUNK] * ends
    at = place % len(pieces)
    within = place % len(pieces[at])
    pieces[at] = pieces[at][:within] + damage + pieces[at][within + len(damage) :]
    form, all_seen, some_seen = reply(), Judge(), Judge()
    form.piece(b"")
    for piece in pieces:
        judged = all_seen.see(piece)
        if form.is_usual(piece):
            # Whatever it is, nothing has ended or broken in it.
            assert judged == (some_seen.is_whole, some_seen.is_broken)
            continue
        assert some_seen.see(piece) == judged
        if judged != (False, False):
            break
        form.piece(piece)


def test_the_usual_piece_is_passed_on_as_the_same_object() -> None:
    form = reply()
    form.piece(b"")
    for content in (TEXT, NULL, CRLF, TEXT + NULL):
        raw = frame(content)
        assert form.is_usual(raw)
        assert form.piece(raw) is raw
    assert not form.is_usual(frame(OURS))
    assert not form.is_usual(frame(TEXT) + frame(TEXT))
    two = frame(TEXT) + frame(TEXT)
    assert form.piece(two) is two
    extended = b"%x;a=b\r\n%b\r\n" % (len(TEXT), TEXT)
    assert form.piece(extended) == frame(TEXT)


def test_a_line_end_in_place_of_a_chunk_is_never_usual_whatever_its_size() -> None:
    """Sizes that no chunk has, such as 21 bytes, are not known by what else a piece may begin with."""
    form = reply()
    form.piece(b"")
    for size in range(3, 2000):
        assert not form.is_usual((b"\n" + b"x" * (size - 4) + b"\n\r\n")[-size:])
        assert not form.is_usual(b"\n" * (size - 2) + b"\r\n")


def test_a_begun_line_is_held_back_and_the_next_pieces_are_usual_again() -> None:
    form = reply()
    assert form.piece(b"").startswith(b"HTTP/1.1 200 OK\r\n")
    raw = frame(TEXT)
    assert form.piece(raw[:20]) == b""
    assert form.piece(raw[20:]) == frame(TEXT)
    assert form.piece(raw) is raw


def test_a_cut_after_the_last_chunk_has_begun_is_no_error_any_more() -> None:
    form = reply()
    read = Read(form.piece(frame(TEXT + DONE) + b"0\r\n") + form.broken(ERROR))
    assert (read.body, read.is_whole) == (TEXT + DONE, True)


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
def test_an_http_1_0_client_gets_content_and_no_length(framing: str) -> None:
    form = reply(framing, is_http11=False, strips=False)
    out = form.piece(TEXT) + form.broken(ERROR)
    head, _, body = out.partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert body == TEXT + b"\ndata: " + ERROR + b"\n\n"


def test_a_sized_event_stream_loses_its_length_so_that_an_event_can_be_taken_out() -> None:
    headers = [*HEADERS, (b"Content-Length", b"%d" % len(TEXT + OURS))]
    form = EventReply(
        200, b"OK", headers, "length", added=b"", is_http11=True, keep_alive=True,
        events=EventStream(strips=True),
    )  # fmt: skip
    out = form.piece(TEXT + OURS) + form.end()
    assert b"content-length" not in out.lower()
    assert Read(out).body == TEXT


def test_what_cannot_be_read_is_not_an_event_stream() -> None:
    assert is_event_stream(200, HEADERS)
    assert not is_event_stream(400, HEADERS)
    assert not is_event_stream(200, [*HEADERS, (b"Content-Encoding", b"gzip")])
    assert is_event_stream(200, [*HEADERS, (b"Content-Encoding", b"identity")])
    assert not is_event_stream(200, [(b"content-type", b"application/json")])
