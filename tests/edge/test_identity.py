"""The same request has the same number when it comes back, and no other has it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.edge.identity import HASHED_ENDS, TRIES_MAX, WAIT_SHARE, bounded_wait, identity_of
from kvgate.edge.relay.heads import Headers

ALICE: Headers = [(b"authorization", b"Bearer alice")]
BOB: Headers = [(b"authorization", b"Bearer bob")]
PATH = b"/v1/chat/completions"


def number(headers: Headers, body: bytes = b"{}", target: bytes = PATH) -> int:
    return identity_of(headers, target, body)[0]


def test_the_same_body_and_key_are_the_same_request() -> None:
    assert number(ALICE) == number(ALICE)
    again: Headers = [*ALICE, (b"x-stainless-retry-count", b"2"), (b"date", b"later")]
    assert number(again) == number(ALICE)


def test_another_body_key_or_path_is_another_request() -> None:
    assert len({number(ALICE), number(BOB), number(ALICE, b"[]"), number(ALICE, target=b"/x")}) == 4


def test_an_idempotency_key_stands_for_the_body_but_not_for_the_client() -> None:
    named: Headers = [(b"Idempotency-Key", b"k1")]
    assert number([*ALICE, *named], b"one") == number([*ALICE, *named], b"two")
    assert number([*ALICE, *named]) != number([*BOB, *named])
    assert number([*ALICE, *named]) != number([*ALICE, (b"idempotency-key", b"k2")])


def test_a_very_long_body_is_told_apart_by_its_ends_and_its_length() -> None:
    long = b"a" * (3 * HASHED_ENDS)
    assert number(ALICE, long) == number(ALICE, bytes(long))
    others = {number(ALICE, b) for b in (long, long + b"a", b"b" + long[1:], long[:-1] + b"b")}
    assert len(others) == 4


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_an_identity_is_never_nothing(body: bytes, key: bytes) -> None:
    assert 0 < number([(b"idempotency-key", key)], body) < 2**64


@pytest.mark.parametrize(
    ("said", "tries"),
    [(b"0", 0), (b"2", 2), (b"9999", TRIES_MAX), (b"-1", 0), (b"x", 0), (b"", 0), (b"9" * 40, 0)],
)
def test_the_tries_are_what_the_client_says_within_reason(said: bytes, tries: int) -> None:
    assert identity_of([(b"X-Stainless-Retry-Count", said)], PATH, b"")[1] == tries


@pytest.mark.parametrize(
    ("name", "value", "seconds"),
    [
        (b"x-request-timeout", b"2", 2.0),
        (b"X-Request-Timeout", b"1.5s", 1.5),
        (b"x-request-timeout", b"250ms", 0.25),
        (b"x-stainless-read-timeout", b"3.0", 3.0),
        (b"x-stainless-timeout", b"4", 4.0),
        (b"x-envoy-expected-rq-timeout-ms", b"1500", 1.5),
        (b"grpc-timeout", b"1S", 1.0),
        (b"grpc-timeout", b"300m", 0.3),
    ],
)
def test_nobody_waits_longer_than_its_client(name: bytes, value: bytes, seconds: float) -> None:
    assert bounded_wait(10.0, [(name, value)]) == pytest.approx(seconds * WAIT_SHARE)
    assert bounded_wait(0.1, [(name, value)]) == 0.1
    assert bounded_wait(0.0, [(name, value)]) == 0.0


@pytest.mark.parametrize("value", [b"", b"soon", b"-5", b"0", b"nan", b"inf", b"1e9", b"\xff", b"NOT_GIVEN"])
def test_a_time_out_that_cannot_be_read_changes_nothing(value: bytes) -> None:
    assert bounded_wait(10.0, [(b"x-request-timeout", value)]) == 10.0


def test_the_least_of_several_counts() -> None:
    headers: Headers = [(b"x-stainless-read-timeout", b"600"), (b"x-request-timeout", b"1")]
    assert bounded_wait(10.0, headers) == WAIT_SHARE
