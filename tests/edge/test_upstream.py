"""Every way to reach an engine: plain, TLS, IPv6, a Unix socket, a name with several addresses."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme
from inside import ANSWER, COMPLETION, Engine, exchange, gateway_before, settle

from kvgate.edge.relay.pool import EnginePool, EngineUnavailable
from kvgate.edge.relay.upstream import Upstream, first_to_answer, interleaved
from kvgate.edge.tls import engine_context

ASK = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (
    len(COMPLETION),
    COMPLETION,
)


@pytest.mark.parametrize(
    ("url", "host", "port", "path", "prefix", "authority"),
    [
        ("http://engine", "engine", 80, None, b"", b"engine"),
        ("http://engine:8000/", "engine", 8000, None, b"", b"engine:8000"),
        ("https://engine/v2/", "engine", 443, None, b"/v2", b"engine"),
        ("https://engine:80", "engine", 80, None, b"", b"engine:80"),
        ("http://[::1]:8000", "::1", 8000, None, b"", b"[::1]:8000"),
        ("http://bücher:8000", "xn--bcher-kva", 8000, None, b"", b"xn--bcher-kva:8000"),
        ("unix:/run/e.sock", "localhost", 0, "/run/e.sock", b"", b"localhost"),
        ("unix:///run/e.sock", "localhost", 0, "/run/e.sock", b"", b"localhost"),
        ("http+unix://%2Frun%2Fe.sock/v2", "localhost", 0, "/run/e.sock", b"/v2", b"localhost"),
    ],
)
def test_an_address_is_read(
    url: str, host: str, port: int, path: str | None, prefix: bytes, authority: bytes
) -> None:
    upstream = Upstream.parse(url)
    assert (upstream.host, upstream.port, upstream.path) == (host, port, path)
    assert (upstream.prefix, upstream.authority) == (prefix, authority)
    assert upstream.is_tls == url.startswith("https")


@pytest.mark.parametrize("url", ["engine:80", "ftp://engine", "http://", "unix:e.sock", "http://u:p@engine"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"upstream|whole path"):
        Upstream.parse(url)


async def through_the_gateway(url: str, **settings: Any) -> bytes:
    async with gateway_before(url, **settings) as gateway:
        return await exchange(gateway.port, ASK)


async def test_an_engine_on_a_unix_socket(tmp_path: Path) -> None:
    engine = Engine()
    path = tmp_path / "e.sock"
    server = await asyncio.start_unix_server(engine.talk, path)
    assert (await through_the_gateway(f"unix:{path}")).startswith(b"HTTP/1.1 200 OK")
    prefixed = f"http+unix://{str(path).replace('/', '%2F')}/v2"
    assert (await through_the_gateway(prefixed)).startswith(b"HTTP/1.1 200 OK")
    server.close()
    assert [head.split(b"\r\n")[0] for head, _ in engine.seen if b"GET" not in head] == [
        b"POST /v1/completions HTTP/1.1",
        b"POST /v2/v1/completions HTTP/1.1",
    ]
    assert b"HTTP/1.1 503" in await through_the_gateway(f"unix:{tmp_path}/none.sock")


async def test_an_engine_on_ipv6() -> None:
    engine = Engine()
    server = await asyncio.start_server(engine.talk, "::1", 0)
    port = server.sockets[0].getsockname()[1]
    assert (await through_the_gateway(f"http://[::1]:{port}")).startswith(b"HTTP/1.1 200 OK")
    server.close()
    assert b"host: [::1]:%d\r\n" % port in engine.seen[0][0]


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def server_context(authority: trustme.CA, name: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    return context


async def test_an_engine_behind_tls_is_verified_and_told_its_name(
    authority: trustme.CA, tmp_path: Path
) -> None:
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca)
    names: list[str | None] = []
    context = server_context(authority, "localhost")
    context.sni_callback = lambda _, name, __: names.append(name)
    engine = Engine()
    server = await asyncio.start_server(engine.talk, "127.0.0.1", 0, ssl=context)
    url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
    assert (await through_the_gateway(url, upstream_ca=str(ca))).startswith(b"HTTP/1.1 200 OK")
    assert set(names) == {"localhost"}

    # The same engine, whose CA nobody vouches for.
    answer = await through_the_gateway(url)
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"certificate is not trusted" in answer
    server.close()


async def test_an_engine_with_somebody_elses_certificate_is_not_used(
    authority: trustme.CA, tmp_path: Path
) -> None:
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca)
    engine = Engine()
    context = server_context(authority, "other.example")
    server = await asyncio.start_server(engine.talk, "127.0.0.1", 0, ssl=context)
    url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
    answer = await through_the_gateway(url, upstream_ca=str(ca))
    server.close()
    assert b"certificate is not trusted" in answer
    assert engine.seen == []


async def test_an_engine_that_does_not_speak_tls_is_given_up_in_time() -> None:
    """It waits for the rest of what it takes for a request."""
    server = await asyncio.start_server(Engine().talk, "127.0.0.1", 0)
    url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
    answer = await through_the_gateway(url, connect_timeout=0.3)
    server.close()
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"no connection within 0.3 s" in answer


def found(family: int, host: str, port: int) -> tuple[int, int, int, str, Any]:
    return family, socket.SOCK_STREAM, 0, "", (host, port)


def test_the_families_take_turns() -> None:
    six = [found(socket.AF_INET6, f"::{n}", 1) for n in (1, 2, 3)]
    four = [found(socket.AF_INET, f"127.0.0.{n}", 1) for n in (1, 2)]
    assert interleaved([*six, *four]) == [six[0], four[0], six[1], four[1], six[2]]
    assert interleaved([*four, *six[:1]]) == [four[0], six[0], four[1]]


class Silent:
    """An address that takes no connection and says nothing: its queue of newcomers is full."""

    def __init__(self) -> None:
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(0)
        self.port = self.listener.getsockname()[1]
        self.fillers = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", self.port))
            self.fillers.append(filler)

    def close(self) -> None:
        for each in [self.listener, *self.fillers]:
            each.close()


async def test_a_dead_and_a_silent_address_do_not_fail_what_the_third_can_do() -> None:
    loop = asyncio.get_running_loop()
    silent = Silent()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead = unused.getsockname()[1]
    server = await asyncio.start_server(Engine().talk, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    addresses = [found(socket.AF_INET, "127.0.0.1", each) for each in (dead, silent.port, port)]
    sock = await first_to_answer(loop, addresses, delay=0.05)
    assert sock.getpeername()[1] == port
    sock.close()
    with pytest.raises(ConnectionRefusedError):
        await first_to_answer(loop, addresses[:1])
    silent.close()
    server.close()
    await settle()


async def test_a_name_is_looked_up_for_each_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has moved between two requests; the first address of its name is dead all the time."""
    loop = asyncio.get_running_loop()
    servers = [await asyncio.start_server(Engine().talk, "127.0.0.1", 0) for _ in range(2)]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead = unused.getsockname()[1]
    at = [ports[0]]

    async def look_up(*_: Any, **__: Any) -> list[Any]:
        return [found(socket.AF_INET, "127.0.0.1", port) for port in (dead, at[0])]

    monkeypatch.setattr(loop, "getaddrinfo", look_up)
    pool = EnginePool("http://engine.example:1", loop, connect_timeout=5.0, idle_timeout=5.0)
    for port in ports:
        at[0] = port
        connection = await pool.connect()
        assert connection.transport.get_extra_info("peername")[1] == port
        connection.abort()
    for server in servers:
        server.close()
    await settle()


async def test_a_connection_that_cannot_be_made_says_why_and_where_only_to_the_operator() -> None:
    loop = asyncio.get_running_loop()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    silent = Silent()
    for url, why in (
        (f"http://127.0.0.1:{port}", "connection refused"),
        (f"http://127.0.0.1:{silent.port}", "no connection within 0.2 s"),
        ("unix:/no/such.sock", "no such file or directory"),
        ("http://no-such-host.invalid:1", "its name cannot be looked up"),
    ):
        pool = EnginePool(url, loop, connect_timeout=0.2 if "0.2" in why else 5.0, idle_timeout=5.0)
        with pytest.raises(EngineUnavailable) as wrong:
            await pool.connect()
        assert str(wrong.value).startswith(why)
        assert pool.last_error == f"{url}: {wrong.value}"
        assert pool.open_connections == 0
    silent.close()


async def test_a_context_that_trusts_the_systems_authorities_checks_names() -> None:
    context = engine_context(None)
    assert context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED


async def test_an_idle_connection_that_the_engine_has_closed_costs_nobody_a_request() -> None:
    """Twenty times: one request, the engine closes, one request."""
    writers: list[asyncio.StreamWriter] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER)
        # The second request on a connection is answered with its end.
        if await reader.read(1):
            writer.transport.abort()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    get = b"GET /x HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n"
    async with gateway_before(url) as gateway:
        for _ in range(20):
            assert (await exchange(gateway.port, get)).startswith(b"HTTP/1.1 200 OK")
    server.close()
    assert len(writers) >= 20
