"""Connections to the engine change hands; nobody may drop one that is somebody else's."""

from __future__ import annotations

import asyncio

import pytest

from kvgate.edge.relay.engine import EngineConnection
from kvgate.edge.relay.pool import EnginePool, EngineUnavailable, _Collector

REQUEST = b"GET / HTTP/1.1\r\nhost: engine\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def serve(answer: bytes = ANSWER) -> tuple[asyncio.Server, str]:
    """An engine that gives the same answer to everything."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def pool_of(url: str) -> EnginePool:
    return EnginePool(url, asyncio.get_running_loop(), connect_timeout=5.0, idle_timeout=5.0)


@pytest.mark.as_python
def test_a_fetch_cancelled_as_its_answer_comes_leaves_the_connection_to_its_next_user() -> None:
    async def run() -> None:
        server, url = await serve()
        pool = pool_of(url)
        second = _Collector(pool.loop)
        give_back = pool.idle

        def idle(connection: EngineConnection) -> None:
            """In the very moment in which the answer is whole: cancelled, and the next one takes over."""
            pool.idle = give_back  # type: ignore[method-assign]  # a spy on the hand-over
            give_back(connection)
            first.cancel()
            taken = pool.take_idle()
            assert taken is connection
            taken.send(REQUEST, second, is_head=False)

        pool.idle = idle  # type: ignore[method-assign]  # a spy on the hand-over
        first = asyncio.create_task(pool.fetch(REQUEST))
        with pytest.raises(asyncio.CancelledError):
            await first
        async with asyncio.timeout(5):
            answer = await second.future

        assert (answer.status, answer.body) == (200, b"ok")
        pool.close()
        server.close()

    asyncio.run(run())


def test_a_connection_is_used_again() -> None:
    async def run() -> None:
        server, url = await serve()
        pool = pool_of(url)
        for _ in range(3):
            assert (await pool.fetch(REQUEST)).body == b"ok"

        assert pool.open_connections == 1
        pool.close()
        server.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "answer",
    [
        b"no http at all\r\n\r\n",
        ANSWER + b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000,
        b"HTTP/1.1 200 OK\ncontent-length: 2\n\nok",
    ],
    ids=["not HTTP", "two answers", "two lengths", "endless head", "bare line feeds"],
)
def test_an_answer_that_is_not_one_is_an_engine_that_is_not_available(answer: bytes) -> None:
    async def run() -> None:
        server, url = await serve(answer)
        pool = pool_of(url)
        async with asyncio.timeout(5):
            with pytest.raises(EngineUnavailable):
                await pool.fetch(REQUEST)
        assert pool.take_idle() is None
        pool.close()
        server.close()

    asyncio.run(run())
