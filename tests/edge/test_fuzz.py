"""Any bytes, cut anywhere, on both sides: nothing escapes, memory is bounded, the books are empty at the end.

`KVGATE_FUZZ` sets the number of inputs for each side (default: 10,000 at the clients' and as many at
the engine's). A failure prints hypothesis's own example; `KVGATE_FUZZ_SEED` repeats a run.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import ANSWER, COMPLETION, FACTS

from kvgate.config import Settings, at
from kvgate.edge.counting.counter import Counter
from kvgate.edge.gatekeeper import Gatekeeper
from kvgate.edge.gateway import Gateway
from kvgate.edge.relay.client import ClientConnection
from kvgate.edge.relay.engine import EngineConnection
from kvgate.edge.relay.framing import HEAD_BYTES_MAX
from kvgate.edge.relay.pool import EnginePool
from kvgate.edge.upstreams.access import OPEN

# Its tests put things in place of methods.
pytestmark = pytest.mark.as_python

INPUTS = int(os.environ.get("KVGATE_FUZZ", "10000"))
SEED = int(os.environ.get("KVGATE_FUZZ_SEED", "20240607"))
BODY_MAX = 100_000

POST = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\n"
REQUESTS = [
    POST + b"Content-Length: %d\r\n\r\n%s" % (len(COMPLETION), COMPLETION),
    POST + b"Transfer-Encoding: chunked\r\n\r\n26;a=b\r\n" + COMPLETION + b"\r\n0\r\nX: y\r\n\r\n",
    b"GET /v1/models?a=b HTTP/1.1\r\nHost: t\r\nConnection: keep-alive, x\r\nX: 1\r\n\r\n",
    b"GET http://t/x HTTP/1.1\r\nHost: t\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n%s" % (len(COMPLETION), COMPLETION),
    b"HEAD / HTTP/1.0\r\n\r\n",
    b"POST /v1/embeddings HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n\r\n{}",
]
ANSWERS = [
    ANSWER,
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nx: y\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: x\n\n",
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 500 No\r\ncontent-length: 3\r\nconnection: close\r\n\r\nbad",
]
# Bytes that matter to a framing, put where they do not belong.
SHARP = [
    *(b"\r", b"\n", b"\r\n", b"\r\n\r\n", b"\0", b" ", b"\t", b":", b"0", b"-1", b"fffffffffffffffff", b";"),
    *(b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"HTTP/1.1", b"Host: x\r\n", b"\xff"),
    *(
        b"Upgrade: h2c\r\nConnection: upgrade\r\n",
        b"0\r\n\r\n",
        b"a" * 70_000,
        b"\r\n x",
        b"GET / HTTP/1.1\r\n",
    ),
]


class Transport:
    """A connection without a network."""

    def __init__(self) -> None:
        self.written = b""
        self.is_closing = False

    def write(self, data: bytes) -> None:
        assert isinstance(data, bytes)
        self.written += data

    def close(self) -> None:
        self.is_closing = True

    abort = close
    write_eof = resume_reading = pause_reading = lambda self: None

    def set_write_buffer_limits(self, high: int) -> None: ...

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, _: str) -> Any:
        return ("192.0.2.1", 1)


class Loop:
    """No time passes, and nothing that would be done later is done."""

    def time(self) -> float:
        return 0.0

    def call_later(self, *_: Any) -> None: ...

    def create_task(self, work: Coroutine[Any, Any, None]) -> Task:
        work.close()
        return Task()


class Task:
    def cancel(self) -> None: ...


class Pool:
    """Hands out connections to an engine that is a `Transport`, and looks at what they are sent."""

    prefix, authority, is_up, last_error = b"", b"engine", True, None
    access = OPEN

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.loop = Loop()
        self.made: list[tuple[EngineConnection, Transport]] = []

    def take_idle(self) -> EngineConnection:
        connection, transport = EngineConnection(self), Transport()
        connection.connection_made(cast(asyncio.Transport, transport))
        self.made.append((connection, transport))
        return connection

    def idle(self, connection: EngineConnection) -> None: ...

    def lost(self, connection: EngineConnection) -> None: ...


ONE_REQUEST = re.compile(
    rb"([A-Z]+) (/[\x21-\x7e]*|\*) HTTP/1\.1\r\n"
    rb"((?:[!#$%&'*+.^_`|~0-9A-Za-z-]+: [\t\x20-\x7e\x80-\xff]*\r\n)+)\r\n(.*)",
    re.S,
)


def check_request(sent: bytes, gateway: Gateway) -> None:
    """Exactly one request, whose end everybody finds at the same place; priced, if it can generate."""
    match = ONE_REQUEST.fullmatch(sent)
    assert match, sent
    method, target, head, body = match.groups()
    fields = [line.split(b":")[0].lower() for line in head.split(b"\r\n")[:-1]]
    lengths = re.findall(rb"(?i)(?:^|\n)content-length: (\d+)\r\n", head)
    assert fields.count(b"host") == 1
    assert not {b"transfer-encoding", b"upgrade", b"connection", b"expect", b"te"} & set(fields)
    assert [int(length) for length in lengths] in ([len(body)], [] if body == b"" else None)
    if method not in (b"GET", b"HEAD", b"OPTIONS"):
        assert (method, target.partition(b"?")[0]) == (b"POST", b"/v1/completions")
        assert gateway.gate.ledger.reserved_blocks > 0
        assert json.loads(body)["max_tokens"] > 0


def fuzzed_gateway() -> Gateway:
    chosen = Settings(
        upstreams=at("http://engine"),
        engine="llamacpp",
        abort_grace=0.0,
        max_body_bytes=BODY_MAX,
        body_memory=BODY_MAX,
    )
    gateway = Gateway(chosen, FACTS)
    gateway.loop = cast(asyncio.AbstractEventLoop, Loop())
    upstream = gateway.upstreams[0]
    upstream.keeper = Gatekeeper(gateway.gate, gateway.loop)
    upstream.pool = cast(EnginePool, Pool(gateway))
    upstream.counter = Counter(gateway.pool, gateway.engine, 1.0)
    return gateway


def play(gateway: Gateway, sent: list[bytes], answers: Callable[[], list[bytes]]) -> None:
    """One client sends `sent`; the engine answers with `answers()`, piece by piece; both leave."""
    pool = cast(Pool, gateway.pool)
    pool.made.clear()
    client = ClientConnection(gateway)
    transport = Transport()
    client.connection_made(cast(asyncio.Transport, transport))
    asked = 0
    for piece in sent:
        if transport.is_closing:
            break
        client.data_received(piece)
        assert client._is_deaf or client._reader._unmoved <= HEAD_BYTES_MAX
        assert 0 <= gateway.bodies.held <= BODY_MAX
        while asked < len(pool.made):
            connection, engine = pool.made[asked]
            asked += 1
            check_request(engine.written, gateway)
            for answer in answers():
                if not connection.is_closed:
                    connection.data_received(answer)
            if not connection.is_closed:
                connection.connection_lost(None)
    client.connection_lost(None)
    for connection, _ in pool.made:
        if not connection.is_closed:
            connection.connection_lost(None)
    assert gateway.clients == set()
    assert gateway.bodies.held == 0
    assert gateway.gate.ledger.reserved_blocks == 0
    assert gateway.gate.ledger.double_releases == 0
    # Whole answers of ours or the engine's, and never bytes of a client in a head of ours.
    assert transport.written == b"" or transport.written.startswith(b"HTTP/1.1 ")


def mutated(rng: random.Random, samples: list[bytes]) -> bytes:
    """A few whole messages, damaged in a few places; or no message at all."""
    if rng.random() < 0.05:
        return rng.randbytes(rng.randrange(2000))
    data = bytearray(b"".join(rng.choice(samples) for _ in range(rng.randint(1, 4))))
    for _ in range(rng.choice([0, 1, 1, 2, 5])):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0:
                data[at:at] = rng.choice(SHARP)
            case 1:
                del data[at : at + rng.randint(1, 30)]
            case 2:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 3:
                data[at:at] = data[: rng.randrange(200)]
            case _:
                del data[at:]
    return bytes(data)


def pieces(rng: random.Random, data: bytes) -> list[bytes]:
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice([0, 1, 3, 10])))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if b > a]


@pytest.mark.parametrize("side", ["client", "engine"])
def test_damaged_messages_end_their_own_connection_and_nothing_else(side: str) -> None:
    gateway = fuzzed_gateway()
    for number in range(INPUTS):
        rng = random.Random(SEED * 1_000_003 + number)
        if side == "client":
            sent = pieces(rng, mutated(rng, REQUESTS))
            answers = [ANSWER]
        else:
            sent = [rng.choice(REQUESTS)]
            answers = pieces(rng, mutated(rng, ANSWERS))
        try:
            play(gateway, sent, lambda: answers)  # noqa: B023
        except BaseException:
            print(f"KVGATE_FUZZ_SEED={SEED}, input {number}: {sent!r} answered {answers!r}")
            raise


@settings(max_examples=300, deadline=None)
@given(
    sent=st.lists(st.binary(max_size=300), max_size=8), answer=st.lists(st.binary(max_size=200), max_size=4)
)
def test_any_bytes_at_all_end_their_own_connection_and_nothing_else(
    sent: list[bytes], answer: list[bytes]
) -> None:
    play(fuzzed_gateway(), [*sent, b"\r\n\r\n", REQUESTS[0]], lambda: answer)


def test_the_check_of_what_reaches_the_engine_can_fail() -> None:
    gateway = fuzzed_gateway()
    good = b"GET /x HTTP/1.1\r\nhost: e\r\n\r\n"
    check_request(good, gateway)
    for bad in (
        good + good,
        good.replace(b"host", b"x"),
        good.replace(b"\r\n\r\n", b"\r\ncontent-length: 1\r\n\r\n"),
        good.replace(b"\r\n\r\n", b"\r\ntransfer-encoding: chunked\r\n\r\n"),
        b"POST /v1/completions HTTP/1.1\r\nhost: e\r\ncontent-length: 2\r\n\r\n{}",
        b"POST /v1/embeddings HTTP/1.1\r\nhost: e\r\ncontent-length: 2\r\n\r\n{}",
    ):
        with pytest.raises(AssertionError):
            check_request(bad, gateway)
