"""Refusals as HTTP answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvgate.core.records import Reason, Refused
from kvgate.wire.refusal import Dialect, render, stream_error


@pytest.mark.parametrize("reason", list(Reason))
@pytest.mark.parametrize("wait", [0.0, 0.2, 1.0, 1.4, 59.5, 60.0, 900.0])
def test_a_retry_is_offered_exactly_where_it_can_help(reason: Reason, wait: float) -> None:
    status, lines, body = render(Refused(reason, retry_after=wait, needed_tokens=10))
    headers = dict(line.split(b": ", 1) for line in lines.rstrip().split(b"\r\n"))
    shown = json.loads(body)

    assert headers[b"x-kvgate-reason"].decode() == reason.value == shown["error"]["code"]
    if reason.is_busy:
        seconds, milliseconds = int(headers[b"retry-after"]), int(headers[b"retry-after-ms"])
        assert status in (429, 503)
        assert 1 <= seconds <= 60
        # The same moment: the whole second that the milliseconds round up to.
        assert seconds - 1 < milliseconds / 1000 <= seconds
        assert shown["retry_after_seconds"] == seconds
        assert b"x-should-retry" not in headers
    else:
        assert status in (400, 401, 403, 404, 413)
        assert b"retry-after" not in headers
        assert headers[b"x-should-retry"] == b"false"


def test_what_is_free_and_when_is_told_under_the_names_that_clients_know() -> None:
    headers = render(Refused(Reason.KV_CAPACITY, retry_after=1.2344, free_tokens=7, usable_tokens=70))[1]
    assert b"x-ratelimit-limit-tokens: 70\r\nx-ratelimit-remaining-tokens: 7\r\n" in headers
    assert b"x-ratelimit-reset-tokens: 1235ms\r\n" in headers
    assert b"retry-after-ms: 1235\r\n" in headers


@pytest.mark.parametrize(
    "refused",
    [
        Refused(Reason.KV_CAPACITY_EXCEEDED, free_tokens=7, usable_tokens=70),
        Refused(Reason.ENGINE_UNAVAILABLE, retry_after=2.0),
        Refused(Reason.KV_CAPACITY, retry_after=2.0),
    ],
)
def test_no_rate_limit_is_told_where_none_is_meant(refused: Refused) -> None:
    assert b"ratelimit" not in render(refused)[1]


@pytest.mark.parametrize("dialect", list(Dialect))
def test_a_wrong_key_is_told_as_each_api_tells_it(dialect: Dialect) -> None:
    refused = Refused(Reason.INVALID_API_KEY, detail="The API key is not known here.")
    status, headers, body = render(refused, dialect=dialect)
    assert status == 401
    assert b"www-authenticate: Bearer\r\n" in headers
    assert b"The API key is not known here." in body
    if dialect is Dialect.ANTHROPIC:
        assert json.loads(body)["error"]["type"] == "authentication_error"


def test_the_operator_chooses_the_status_of_a_busy_pool_and_of_nothing_else() -> None:
    assert render(Refused(Reason.KV_CAPACITY), busy_status=529)[0] == 529
    assert render(Refused(Reason.DRAINING), busy_status=529)[0] == 503
    assert render(Refused(Reason.KV_CAPACITY_EXCEEDED), busy_status=529)[0] == 413


def test_the_message_says_what_an_unset_cap_cost_and_what_would_fit() -> None:
    refused = Refused(
        Reason.KV_CAPACITY,
        prompt_tokens=100,
        needed_tokens=4000,
        free_tokens=600,
        usable_tokens=7000,
        output_cap=3901,
        output_cap_that_fits=501,
    )
    message = json.loads(render(refused)[2])["error"]["message"]

    assert "unset output cap, which may grow to 3901" in message
    assert "600 of 7000 are free" in message
    assert "max_tokens of 501 or less" in message


FULL = Refused(
    Reason.KV_CAPACITY,
    retry_after=3.0,
    prompt_tokens=100,
    needed_tokens=4000,
    free_tokens=600,
    usable_tokens=7000,
    output_cap=3901,
    output_cap_that_fits=501,
)
FACTS = {
    "needed_tokens": 4000,
    "free_tokens": 600,
    "usable_tokens": 7000,
    "output_cap": 3901,
    "output_cap_that_fits": 501,
    "retry_after_seconds": 3,
    "param": "p",
}


def inner(dialect: Dialect, shown: dict[str, Any]) -> dict[str, Any]:
    """The object that holds the facts in each dialect."""
    return shown if dialect in (Dialect.TGI, Dialect.OLLAMA) else shown["error"]


@pytest.mark.parametrize("dialect", list(Dialect))
def test_every_dialect_tells_the_same_facts_with_the_same_status_and_headers(dialect: Dialect) -> None:
    status, lines, body = render(FULL, dialect=dialect, param="p", cap_name="THE_CAP")
    shown = json.loads(body)
    found = inner(dialect, shown)

    assert (status, lines) == render(FULL, param="p")[:2]
    assert {name: found[name] for name in FACTS} == FACTS
    assert shown["retry_after_seconds"] == 3
    assert "kv_capacity" in (found.get("code"), found.get("reason"))
    assert "With THE_CAP of 501 or less" in (found["error"] if found is shown else found["message"])


def test_each_client_finds_its_message_where_it_looks_for_it() -> None:
    def shown(dialect: Dialect, reason: Reason = Reason.KV_CAPACITY, busy_status: int = 429) -> Any:
        return json.loads(render(Refused(reason, detail="D"), dialect=dialect, busy_status=busy_status)[2])

    assert shown(Dialect.ANTHROPIC)["type"] == "error"
    assert shown(Dialect.ANTHROPIC)["error"]["type"] == "rate_limit_error"
    assert shown(Dialect.ANTHROPIC, busy_status=529)["error"]["type"] == "overloaded_error"
    assert shown(Dialect.ANTHROPIC, Reason.DRAINING)["error"]["type"] == "overloaded_error"
    assert shown(Dialect.ANTHROPIC, Reason.KV_CAPACITY_EXCEEDED)["error"]["type"] == "request_too_large"
    assert shown(Dialect.ANTHROPIC, Reason.INVALID_REQUEST)["error"]["type"] == "invalid_request_error"
    assert shown(Dialect.TGI)["error"] == "D"
    assert shown(Dialect.TGI)["error_type"] == "overloaded"
    assert shown(Dialect.TGI, Reason.INVALID_REQUEST)["error_type"] == "validation"
    assert shown(Dialect.OLLAMA)["error"] == "D"
    assert shown(Dialect.LLAMACPP)["error"]["code"] == 429
    assert shown(Dialect.LLAMACPP)["error"]["reason"] == "kv_capacity"
    assert shown(Dialect.SGLANG)["error"]["message"] == "D"


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_a_type_in_every_dialect(dialect: Dialect, reason: Reason) -> None:
    shown = json.loads(render(Refused(reason, detail="D"), dialect=dialect)[2])

    assert "D" in (shown["error"], inner(dialect, shown).get("message"))


def test_an_error_within_an_answer_is_an_event_or_a_line_of_its_own() -> None:
    assert stream_error("m", "c").startswith(b"data: {")
    assert stream_error("m", "c").endswith(b"}\n\n")
    assert stream_error("m", "c", dialect=Dialect.ANTHROPIC).startswith(b"event: error\ndata: ")
    assert json.loads(stream_error("m", "c", dialect=Dialect.OLLAMA, lines=True)) == {
        "error": "m",
        "code": "c",
    }
    for dialect in Dialect:
        event = stream_error("a\nb", "c", dialect=dialect)
        assert event.count(b"\n") == 2 + (dialect is Dialect.ANTHROPIC)
