"""What an answer says about trying again: when, whether at all, and with which smaller cap. No I/O.

Reads any server's `Retry-After` (seconds or a date), the finer `retry-after-ms`, `x-should-retry`, and
the figures that a refusal of kvgate adds. What cannot be read counts as not said.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

# What OpenAI's and Anthropic's own libraries try again: the request was not answered.
RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
# Where each API has its output cap; the first that the body holds is the one that counts.
CAP_NAMES = ("max_completion_tokens", "max_tokens", "max_output_tokens", "n_predict")


@dataclass(frozen=True, slots=True)
class Advice:
    """`again`: whether another try can help. `wait`: seconds that the server named, None where it named
    none. `is_slot`: the moment is for this client alone, so nothing needs to be added to it."""

    again: bool
    wait: float | None = None
    is_slot: bool = False


def advice(status: int, headers: Mapping[str, str], wall_clock: float) -> Advice:
    """`wall_clock`: seconds since 1970, for a `Retry-After` that is a date. Names in any case, where the
    mapping allows it; httpx's does."""
    said = headers.get("x-should-retry")
    again = status in RETRIED if said is None else said.strip().lower() == "true"
    if status < 400 or not again:
        return Advice(False)
    return Advice(True, _named_wait(headers, wall_clock), "x-kvgate-reason" in headers)


def _named_wait(headers: Mapping[str, str], wall_clock: float) -> float | None:
    for name, scale in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        text = headers.get(name)
        if text is None:
            continue
        try:
            wait = float(text) / scale
        except ValueError:
            try:
                wait = parsedate_to_datetime(text).timestamp() - wall_clock
            except ValueError:
                continue
        if math.isfinite(wait):
            return max(0.0, wait)
    return None


def cap_that_fits(body: bytes) -> int | None:
    """The cap with which a refused request would be admitted now, as kvgate's refusal says."""
    answer = _object(body)
    error = answer.get("error")
    for place in (error if isinstance(error, dict) else {}, answer):
        fits = place.get("output_cap_that_fits")
        if isinstance(fits, int) and not isinstance(fits, bool) and fits > 0:
            return fits
    return None


def with_cap(body: bytes, path: str, cap: int) -> bytes | None:
    """The request's body with at most `cap`; None where that would change nothing or is not known how."""
    request = _object(body)
    if not request:
        return None
    names = [name for name in CAP_NAMES if name in request]
    if not names:
        names = ["max_output_tokens" if path.rstrip("/").endswith("/responses") else "max_tokens"]
    changed = False
    for name in names:
        own = request.get(name)
        if not isinstance(own, int) or own < 0 or own > cap:
            request[name], changed = cap, True
    return json.dumps(request, ensure_ascii=False).encode() if changed else None


def _object(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
