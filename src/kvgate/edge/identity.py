"""What a client says about its request beside the body: that it was here before, and how long it waits.

A request that comes back is known by its `Idempotency-Key`, else by its API key and its body, so that
it keeps the place that it had. Nobody can take another's: the API key is part of both. What is kept is
a number of 64 bits, from which nothing can be read back.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from hashlib import blake2b

from kvgate.core.records import Ask, Seconds
from kvgate.edge.relay.heads import Headers
from kvgate.edge.tenants import hash_of

# Of a body that is longer, its length and both ends tell it apart: hashing all of 32 MB would hold up
# every other stream for tens of milliseconds.
HASHED_ENDS = 32 * 1024
TRIES_MAX = 100
# Of the time that its client gives a request, the part that it may spend in the line.
WAIT_SHARE = 0.9
_GRPC_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_GRPC = re.compile(r"(\d{1,8})([HMSmun])")
_SECONDS = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s)?")


def identity_of(headers: Headers, target: bytes, body: bytes) -> tuple[int, int]:
    """`(identity, tries)`: a number that is the same when the request comes back, and how often its
    client says that it has tried before."""
    key = tries = b""
    for name, value in headers:
        lower = name.lower()
        if lower == b"idempotency-key":
            key = value
        elif lower == b"x-stainless-retry-count":
            tries = value
    digest = blake2b((hash_of(headers) or "").encode("ascii"), digest_size=8)
    if key:
        digest.update(b"\0key\0" + key)
    else:
        digest.update(b"\0body\0%d\0" % len(body) + target + b"\0")
        if len(body) > 2 * HASHED_ENDS:
            digest.update(body[:HASHED_ENDS])
            digest.update(body[-HASHED_ENDS:])
        else:
            digest.update(body)
    count = int(tries) if tries.isdigit() and len(tries) < 10 else 0
    # 0 means "not known" to the gate.
    return int.from_bytes(digest.digest(), "big") or 1, min(count, TRIES_MAX)


def in_full(ask: Ask, headers: Headers, target: bytes, body: bytes) -> Ask:
    """`ask` with what its client says: who it is, and how long it waits."""
    identity, tries = identity_of(headers, target, body)
    return replace(ask, max_wait=bounded_wait(ask.max_wait, headers), identity=identity, tries=tries)


def bounded_wait(max_wait: Seconds, headers: Headers) -> Seconds:
    """`max_wait`, or less where the client gives up sooner.

    Read are `x-request-timeout` (seconds, or with `s` or `ms`), `grpc-timeout` (its own form, as `5S`),
    `x-envoy-expected-rq-timeout-ms`, and what OpenAI's and Anthropic's libraries send by themselves,
    `x-stainless-read-timeout` and `x-stainless-timeout`. The least of them counts.
    """
    if max_wait <= 0:
        return max_wait
    least = math.inf
    for name, value in headers:
        kind = _TIMEOUTS.get(name.lower())
        if kind is not None:
            least = min(least, _seconds(kind, value.decode("latin-1").strip()))
    return min(max_wait, least * WAIT_SHARE)


_TIMEOUTS = {
    b"x-request-timeout": "s",
    b"x-stainless-read-timeout": "s",
    b"x-stainless-timeout": "s",
    b"x-envoy-expected-rq-timeout-ms": "ms",
    b"grpc-timeout": "grpc",
}


def _seconds(kind: str, text: str) -> Seconds:
    """Infinite for what cannot be read: a header of somebody else's is no reason to refuse."""
    if kind == "grpc":
        match = _GRPC.fullmatch(text)
        return math.inf if match is None else int(match[1]) * _GRPC_UNITS[match[2]]
    match = _SECONDS.fullmatch(text)
    if match is None or not float(match[1]):
        return math.inf
    return float(match[1]) * (1e-3 if (match[2] or kind) == "ms" else 1.0)
