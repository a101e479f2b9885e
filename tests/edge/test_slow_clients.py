"""Clients that send slowly, take nothing or too much: each costs a bounded connection, and nobody else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from inside import COMPLETION, exchange, gateway_and_engine, gateway_before, until

from kvgate.edge.gateway import Gateway
from kvgate.edge.relay import framing

POST = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\n"
WHOLE = POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(COMPLETION), COMPLETION)
MIB = 1024 * 1024


class Source:
    """An engine that streams as much as it can get rid of. `sent`: bytes handed to its own system."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent = 0
        self.gone = asyncio.Event()

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                return
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % self.size)
            while self.sent < self.size:
                writer.write(b"x" * 65_536)
                await writer.drain()
                self.sent += 65_536
        except (ConnectionError, asyncio.CancelledError, asyncio.IncompleteReadError):
            self.gone.set()
        finally:
            writer.close()


@asynccontextmanager
async def source_behind_a_gateway(size: int, **settings: float) -> AsyncIterator[tuple[Gateway, Source]]:
    source = Source(size)
    server = await asyncio.start_server(source.talk, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with gateway_before(url, **settings) as gateway:
        yield gateway, source
    server.close()


async def deaf_client(port: int, data: bytes) -> socket.socket:
    """Sends and never reads; its system takes little on its behalf."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", port))
    await loop.sock_sendall(sock, data)
    return sock


async def test_a_client_that_takes_nothing_stops_the_engine_and_keeps_its_reservation() -> None:
    async with source_behind_a_gateway(100 * MIB) as (gateway, source):
        sock = await deaf_client(gateway.port, WHOLE)
        await until(lambda: source.sent > 0)
        before = -1
        while source.sent != before:
            before = source.sent
            await asyncio.sleep(0.3)
        # What the engine got rid of lies in the systems' buffers, and a little in the gateway.
        assert source.sent < 20 * MIB
        (client,) = gateway.clients
        assert client.transport.get_write_buffer_size() < MIB
        assert gateway.gate.ledger.reserved_blocks > 0
        # Others are served meanwhile.
        assert b" 200 OK" in await exchange(gateway.port, b"GET /x HTTP/1.0\r\n\r\n")
        sock.close()
        await until(lambda: gateway.gate.ledger.reserved_blocks == 0)
        async with asyncio.timeout(5):
            await source.gone.wait()


async def test_a_client_that_takes_nothing_for_too_long_is_given_up() -> None:
    async with source_behind_a_gateway(100 * MIB, client_idle_timeout=0.4) as (gateway, source):
        sock = await deaf_client(gateway.port, WHOLE)
        await until(lambda: source.sent > 0)
        await until(lambda: not gateway.clients)
        assert gateway.gate.ledger.reserved_blocks == 0
        sock.close()


async def test_a_client_that_takes_a_little_now_and_then_is_not_given_up() -> None:
    async with source_behind_a_gateway(100 * MIB, client_idle_timeout=0.5) as (gateway, source):
        sock = await deaf_client(gateway.port, WHOLE)
        loop = asyncio.get_running_loop()
        await until(lambda: source.sent > 0)
        ends = loop.time() + 2.0
        while loop.time() < ends:
            for _ in range(40):
                await loop.sock_recv(sock, 65_536)
            await asyncio.sleep(0.1)
        assert len(gateway.clients) == 1
        assert gateway.gate.ledger.reserved_blocks > 0
        sock.close()
        await until(lambda: not gateway.clients)


async def test_an_answer_that_is_whole_but_not_taken_does_not_hold_the_connection_for_ever() -> None:
    """The exchange is over, so only the connection is left; its last bytes wait."""
    async with source_behind_a_gateway(200_000, client_idle_timeout=0.4) as (gateway, source):
        sock = await deaf_client(gateway.port, b"")
        await until(lambda: bool(gateway.clients))
        (client,) = gateway.clients
        accepted = client.transport.get_extra_info("socket")
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8_192)
        await asyncio.get_running_loop().sock_sendall(sock, WHOLE)
        await until(lambda: source.sent >= 200_000 and client.exchange is None)
        assert client.transport.get_write_buffer_size() > 0
        await until(lambda: not gateway.clients)
        sock.close()


async def dripped(port: int, data: bytes, *, every: float = 0.02) -> bytes:
    """Sends a byte now and then, until the gateway has answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = asyncio.create_task(reader.read())
    try:
        for byte in data * 1000:
            writer.write(bytes([byte]))
            done, _ = await asyncio.wait([answer], timeout=every)
            if done:
                break
        async with asyncio.timeout(5):
            return await answer
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_a_head_that_drips_in_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "HEAD_SECONDS", 0.3)
    async with gateway_and_engine(client_idle_timeout=0.4) as (gateway, engine):
        answer = await dripped(gateway.port, POST + b"X: " + b"y" * 10_000)
        assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert engine.seen == []


async def test_a_body_that_drips_in_is_refused_in_time_and_costs_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(framing, "BODY_GRACE_SECONDS", 0.3)
    async with gateway_and_engine(client_idle_timeout=0.4) as (gateway, engine):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(POST + b"Content-Length: 1000000\r\n\r\n" + b"x" * 100)
        async with asyncio.timeout(5):
            answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"bytes a second" in answer
        assert gateway.bodies.held == 0
        assert engine.seen == []


async def test_a_body_that_keeps_coming_has_a_limit_for_all_of_it() -> None:
    async with gateway_and_engine(client_timeout=0.5) as (gateway, engine):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(POST + b"Content-Length: 30000000\r\n\r\n")
        answer = asyncio.create_task(reader.read())
        while not answer.done():
            writer.write(b"x" * 1000)
            await asyncio.wait([answer], timeout=0.02)
        writer.close()
        assert (await answer).startswith(b"HTTP/1.1 408 ")
        assert b"--client-timeout" in await answer
        assert engine.seen == []


async def test_the_bodies_of_all_clients_together_have_a_limit() -> None:
    async with gateway_and_engine(body_memory=3 * MIB) as (gateway, engine):
        held = []
        for _ in range(2):
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(POST + b"Content-Length: %d\r\n\r\n" % (2 * MIB) + b"x" * MIB)
            held.append(writer)
        await until(lambda: gateway.bodies.held == 2 * MIB)

        # By its length alone; and, where it tells none, as it comes.
        sized = POST + b"Content-Length: %d\r\n\r\n" % (MIB + 1)
        refused = await exchange(gateway.port, sized)
        assert refused.startswith(b"HTTP/1.1 429 ")
        assert b"--body-memory" in refused
        assert b"\r\nretry-after: " in refused
        unsized = POST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % (2 * MIB) + b"x" * (MIB + 1)
        assert (await exchange(gateway.port, unsized)).startswith(b"HTTP/1.1 429 ")
        assert gateway.bodies.held == 2 * MIB

        # A small one has room, and the room of those who leave comes back.
        assert (await exchange(gateway.port, WHOLE)).startswith(b"HTTP/1.1 200 ")
        for writer in held:
            writer.transport.abort()
        await until(lambda: gateway.bodies.held == 0)
        assert len(engine.seen) == 1


async def test_the_body_of_a_stream_is_let_go_when_its_answer_begins() -> None:
    async with source_behind_a_gateway(100 * MIB) as (gateway, source):
        sock = await deaf_client(gateway.port, WHOLE)
        await until(lambda: source.sent > 0)
        await until(lambda: gateway.bodies.held == 0)
        assert gateway.gate.ledger.reserved_blocks > 0
        sock.close()
