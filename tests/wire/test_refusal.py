"""Refusals as HTTP answers."""

from __future__ import annotations

import json

import pytest

from kvgate.core.records import Reason, Refused
from kvgate.wire.refusal import render


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
        assert status in (400, 403, 413)
        assert b"retry-after" not in headers
        assert headers[b"x-should-retry"] == b"false"


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
