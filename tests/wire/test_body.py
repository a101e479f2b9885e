"""The JSON body with the places of its values."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import NoneType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.wire.body import BadBody, Body, _parse, _parse_slowly

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text(), JSON, max_size=6)


@given(OBJECTS, st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_every_json_object_is_read_as_the_standard_library_reads_it(
    value: dict[str, object], ascii_only: bool, indent: int | str | None
) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return
    assert Body(raw).fields == value


@given(OBJECTS, st.dictionaries(st.sampled_from(["max_tokens", "n_predict", "n"]), st.integers(1, 10**9)))
def test_replacing_changes_the_named_values_and_nothing_else(
    value: dict[str, object], new: dict[str, int]
) -> None:
    raw = json.dumps(value).encode()

    changed = Body(raw).replaced(new)

    assert json.loads(changed) == value | new
    assert [k for k in json.loads(changed) if k in value] == list(value)


def read(parse: Callable[[str], dict[str, Any]], text: str) -> dict[str, Any] | str:
    try:
        return parse(text)
    except BadBody as error:
        return str(error)


@given(OBJECTS, st.data())
def test_both_ways_to_read_a_body_agree_on_what_is_none(
    value: dict[str, object], data: st.DataObject
) -> None:
    text = json.dumps(value) + data.draw(st.sampled_from(["", " ", "\n}", "x"]))
    at = data.draw(st.integers(0, len(text)))
    text = (
        text[:at]
        + data.draw(st.sampled_from(['"', ",", ":", "{", "}", "[", "]", "\\", "0", "-"]))
        + text[at:]
    )
    assert read(_parse, text) == read(_parse_slowly, text)


def test_what_the_client_wrote_keeps_its_own_spelling() -> None:
    raw = b'{ "temperature":1.0e0 ,"max_tokens" : 12345, "seed":18446744073709551616,"s":"\\u00e9\\/" }'

    assert Body(raw).replaced({"max_tokens": 7}) == raw.replace(b"12345", b"7")


@given(st.binary(max_size=64))
def test_no_bytes_raise_anything_but_bad_body(raw: bytes) -> None:
    try:
        fields = Body(raw).fields
    except BadBody:
        return
    assert fields == json.loads(raw)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "empty"),
        (b"[1]", "must be a JSON object"),
        (b"3", "must be a JSON object"),
        (b'{"a":1', "ends too early"),
        (b'{"a":1} x', "extra data"),
        (b'{"a":NaN}', "NaN"),
        (b'{"a":1,"a":2}', "appears twice"),
        (b"\xff", "UTF-8"),
        (b'{"a":' + b"[" * 100_000, "too deeply"),
        (b'{"a":' + b"9" * 5_000 + b"}", "limit"),
        (b'{"a":1,}', "expected a key"),
        (b'{"a" 1}', "expected ':'"),
    ],
)
def test_a_bad_body_is_told_what_is_wrong_with_it(raw: bytes, words: str) -> None:
    with pytest.raises(BadBody, match=words):
        Body(raw)


NESTED = b'{ "a" : {"x":1.50, "l":[ {"m" :5}, {} ]} ,"n":null,"e":{ } }'


@pytest.mark.parametrize(
    ("new", "old_text", "new_text"),
    [
        ({("a", "x"): 7}, b"1.50", b"7"),
        ({("a", "l", 0, "m"): 9}, b":5", b":9"),
        ({("a", "l", 1, "m"): 9}, b"{}", b'{"m":9}'),
        ({("a", "y"): 2}, b'{"x"', b'{"y":2,"x"'),
        ({("n", "q"): 3, ("n", "r"): 4}, b"null", b'{"q": 3, "r": 4}'),
        ({("e", "q"): 3}, b"{ }", b'{"q":3 }'),
        ({("z", "q"): 3, ("z", "r"): 4}, b'{ "a"', b'{"z":{"q":3,"r":4}, "a"'),
        (
            {"stream_options": {"include_usage": True}},
            b'{ "a"',
            b'{"stream_options":{"include_usage":true}, "a"',
        ),
        ({"e": "text"}, b"{ }", b'"text"'),
    ],
)
def test_a_nested_value_is_replaced_or_added_and_every_other_byte_stays(
    new: Any, old_text: bytes, new_text: bytes
) -> None:
    assert NESTED.count(old_text) == 1
    assert Body(NESTED).replaced(new) == NESTED.replace(old_text, new_text)


@pytest.mark.parametrize("path", [("a", "x", "y"), ("a", "l", 5), ("a", "l", "m"), ("a", 0)])
def test_there_is_no_place_below_what_is_not_an_object(path: Any) -> None:
    with pytest.raises(LookupError):
        Body(NESTED).replaced({path: 1})


@given(OBJECTS, st.lists(st.sampled_from(["p", "q"]) | st.text(), min_size=1, max_size=3), st.integers())
def test_a_value_at_any_path_is_found_again_and_the_rest_is_as_before(
    value: dict[str, Any], path: list[str], number: int
) -> None:
    body = Body(json.dumps(value).encode())
    try:
        changed = Body(body.replaced({tuple(path): number}))
    except LookupError:
        assert any(not isinstance(body.at(tuple(path[:end])), dict | NoneType) for end in range(1, len(path)))
        return
    assert changed.at(tuple(path)) == number
    assert {k: v for k, v in changed.fields.items() if k != path[0]} == {
        k: v for k, v in value.items() if k != path[0]
    }


@pytest.mark.parametrize(
    "raw", [b'{"a":{"b":1,"b":2}}', b'{"a":[{"b":1,"c":0,"b":2}]}', b'{"a":{"b":1,"\\u0062":2}}']
)
def test_a_key_that_appears_twice_at_any_depth_is_named(raw: bytes) -> None:
    with pytest.raises(BadBody, match="'b' appears twice") as caught:
        Body(raw)
    assert caught.value.param == "b"
