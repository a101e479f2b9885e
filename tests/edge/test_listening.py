"""Where clients come in: addresses, TLS, Unix sockets, how many, and what happens at the limits."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trustme
from inside import exchange, gateway_and_engine, until

from kvgate.edge import open_files
from kvgate.edge.listening import Listener, liveness
from kvgate.edge.tls import BadCertificate, listening_context

GET = b"GET /x HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n"


async def test_clients_come_by_ipv6() -> None:
    async with gateway_and_engine(listen_host="::1") as (gateway, engine):
        reader, writer = await asyncio.open_connection("::1", gateway.port)
        writer.write(GET)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
        writer.close()
    assert b"x-forwarded-for: ::1\r\n" in engine.seen[0][0]


async def test_clients_come_by_every_address_of_a_name_on_one_port() -> None:
    async with gateway_and_engine(listen_host="localhost") as (gateway, _):
        assert (await exchange(gateway.port, GET)).startswith(b"HTTP/1.1 200 OK")


async def test_clients_come_by_a_unix_socket_and_it_is_gone_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "kvgate.sock"
    # Left over by a process that died.
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with gateway_and_engine(listen_host=f"unix:{path}") as (gateway, engine):
        assert gateway.port == 0
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(GET)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
        writer.close()

        second = Listener(f"unix:{path}", 0, tls=None, idle_timeout=1.0)
        with pytest.raises(OSError, match=r"[Aa]ddress already in use"):
            await second.open(asyncio.get_running_loop(), asyncio.Protocol)
        assert path.exists()
    assert not path.exists()
    assert b"x-forwarded-for: unknown\r\n" in engine.seen[0][0]


async def test_a_file_that_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    listener = Listener(f"unix:{path}", 0, tls=None, idle_timeout=1.0)
    with pytest.raises(OSError):
        await listener.open(asyncio.get_running_loop(), asyncio.Protocol)
    assert path.read_text() == "data"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def written(authority: trustme.CA, directory: Path, name: str = "localhost") -> tuple[str, str]:
    cert, key = directory / f"{name}.pem", directory / f"{name}.key"
    issued = authority.issue_cert(name)
    issued.private_key_pem.write_to_path(key)
    cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    return str(cert), str(key)


async def test_clients_speak_tls(authority: trustme.CA, tmp_path: Path) -> None:
    cert, key = written(authority, tmp_path)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    async with gateway_and_engine(tls_cert=cert, tls_key=key) as (gateway, _):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", gateway.port, ssl=context, server_hostname="localhost"
        )
        writer.write(GET)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
        writer.close()
        # A client that speaks plain HTTP to it gets no answer, and does no harm.
        assert not (await exchange(gateway.port, GET)).startswith(b"HTTP")


def test_files_that_make_no_certificate_are_named(authority: trustme.CA, tmp_path: Path) -> None:
    cert, key = written(authority, tmp_path)
    _, other = written(authority, tmp_path, "other.example")
    for arguments in ((cert, other), (key, key), (cert, None), (str(tmp_path / "none"), None)):
        with pytest.raises(BadCertificate, match="--tls-cert"):
            listening_context(*arguments)


async def test_the_system_asks_after_clients_that_are_silent() -> None:
    """FC-27: one that has vanished without a word is noticed by its system's silence."""
    async with gateway_and_engine(client_idle_timeout=8.0) as (gateway, _):
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        await until(lambda: bool(gateway.clients))
        (client,) = gateway.clients
        accepted = client.transport.get_extra_info("socket")
        for level, name, value in liveness(8.0):
            got = accepted.getsockopt(level, name)
            assert bool(got) if level == socket.SOL_SOCKET else got == value
        assert (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 8000) in liveness(8.0)
        writer.close()


async def test_a_client_too_many_is_told_so_and_there_is_room_again_afterwards() -> None:
    async with gateway_and_engine(max_connections=3) as (gateway, engine):
        held = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(3)]
        await until(lambda: len(gateway.clients) == 3)
        refused = await exchange(gateway.port, GET)
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"--max-connections" in refused
        assert b"\r\nretry-after: " in refused
        assert engine.seen == []
        for _, writer in held:
            writer.close()
        await until(lambda: not gateway.clients)
        assert (await exchange(gateway.port, GET)).startswith(b"HTTP/1.1 200 OK")


async def test_a_flood_of_clients_above_the_limit_holds_a_bounded_number_of_connections() -> None:
    async with gateway_and_engine(max_connections=3) as (gateway, _):
        flood = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(200)]
        await until(lambda: len(gateway.clients) <= 3 + 64)
        for _, writer in flood:
            writer.transport.abort()


def test_the_limit_of_open_files_is_told_in_connections() -> None:
    assert open_files.carried(20_256) == 10_000
    assert open_files.carried(64) == 1
    assert open_files.warning(10_000, 20_256) is None
    text = open_files.warning(10_000, 4_096)
    assert text is not None
    assert "carries 1920 client connections" in text
    assert "LimitNOFILE=20256" in text


def test_the_soft_limit_is_raised_as_far_as_it_goes() -> None:
    code = (
        "import resource; from kvgate.edge import open_files; hard = resource.getrlimit(7)[1];"
        "resource.setrlimit(7, (300, hard)); print(open_files.raise_limit(500), hard)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    got, hard = map(int, shown.split())
    assert resource.RLIMIT_NOFILE == 7
    assert got == min(hard, 1256)


# A gateway whose process can hold fewer connections than it is told to take.
STARVED = """
import asyncio, json, os, resource, sys
import uvloop
from kvgate.config import Settings, at
from kvgate.core.records import PoolFacts
from kvgate.edge.gateway import Gateway

async def main():
    engines = at("http://127.0.0.1:9")
    settings = Settings(upstreams=engines, engine="llamacpp", listen_port=0, drain_timeout=0.0)
    gateway = Gateway(settings, PoolFacts(100, 1, 100))
    await gateway.start()
    print(gateway.port, flush=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20,) * 2)
    await asyncio.to_thread(sys.stdin.readline)
    before = os.times()
    await asyncio.sleep(0.5)
    after = os.times()
    print(json.dumps({"clients": len(gateway.clients), "cpu": sum(after[:2]) - sum(before[:2])}), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await gateway.stop()

uvloop.run(main())
"""


def first_answer(port: int, within: float = 10.0) -> bytes:
    """What the first client is told that is not turned away at the door."""
    ends = time.monotonic() + within
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
                client.sendall(GET)
                return client.recv(100)
        except ConnectionResetError:
            assert time.monotonic() < ends, "nobody is served"


def test_a_process_out_of_files_neither_spins_nor_dies() -> None:
    """More clients than it has files for; when they are gone it serves again."""
    with subprocess.Popen(
        [sys.executable, "-c", STARVED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        port = int(child.stdout.readline())
        flood = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(60)]
        child.stdin.write("\n")
        seen = json.loads(child.stdout.readline())
        assert 0 < seen["clients"] < 40
        # A loop that is woken again and again for a connection that it cannot take would use all of it.
        assert seen["cpu"] < 0.3
        for each in flood:
            each.close()
        assert first_answer(port).startswith(b"HTTP/1.1 503")  # no engine, but a whole answer
        child.stdin.write("\n")
        assert child.wait(10) == 0
