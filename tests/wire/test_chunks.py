"""Chunked framing is taken off the same way wherever the pieces are cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvgate.wire.chunks import LAST_CHUNK, ChunkReader, frame, is_whole

CONTENTS = st.lists(st.binary(min_size=1, max_size=40), max_size=6)
ENDINGS = st.sampled_from([LAST_CHUNK, b"0;a=b\r\n\r\n", b"0\r\nx-trailer: yes\r\n\r\n"])


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@given(CONTENTS, ENDINGS, st.lists(st.integers(0, 1000), max_size=12))
def test_content_and_ending_come_out_whole(contents: list[bytes], ending: bytes, places: list[int]) -> None:
    reader = ChunkReader()
    raw = b"".join(map(frame, contents)) + ending
    assert b"".join(reader.feed(piece) for piece in cut(raw, places)) == b"".join(contents)
    assert reader.ending == ending
    assert not reader.is_between_chunks


@given(CONTENTS, st.integers(0, 300))
def test_only_whole_chunks_are_whole(contents: list[bytes], at: int) -> None:
    raw = b"".join(map(frame, contents))
    assert is_whole(raw)
    ends = {sum(len(frame(c)) for c in contents[:n]) for n in range(len(contents) + 1)}
    part = raw[:at]
    assert is_whole(part) == (len(part) in ends)
    reader = ChunkReader()
    reader.feed(part)
    assert reader.is_between_chunks == (len(part) in ends)


def test_the_last_chunk_and_extensions_are_left_to_the_reader() -> None:
    assert not is_whole(frame(b"abc") + LAST_CHUNK)
    assert not is_whole(b"3;name=value\r\nabc\r\n")
    reader = ChunkReader()
    assert reader.feed(b"3;name=value\r\nabc\r\n") == b"abc"
    assert reader.is_between_chunks


def test_no_content_makes_no_chunk_for_an_empty_one_would_be_the_end() -> None:
    assert frame(b"") == b""
    assert frame(b"x" * 26) == b"1a\r\n" + b"x" * 26 + b"\r\n"
