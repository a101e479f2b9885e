"""One round of figures for one gateway, started afresh on its own core.

What is counted, and what is not:
- CPU is that of the gateway's process and all below it, user and system, over the time in which the
  measured traffic runs; the client's and the engine's is not in it, idle costs of the gateway are.
- A streamed chunk is one event that reached the client. Requests of the ramp-up are not counted.
- Time to the first event is the client's, from the write of the request; `direct` is the same to the
  engine without a gateway in the same round, and "added" is the difference of the two quantiles.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from relaybench import client
from relaybench.client import Broken, Caller, Connection, Listener, PacedCaller, Prober, Tally
from relaybench.engine import INTERVAL
from relaybench.gateways import Gateway
from relaybench.processes import cores, cpu_us, free_port, resident_bytes, running, tree

PROBES = 400  # first events timed in each of the two states
PACE = 1000  # requests a second
BEGIN_WITHIN = 20.0  # seconds, for all streams
EVENTS_MIN = 1000  # for a figure that means something

# First events: without a gateway, and through it.
Probes: TypeAlias = list[tuple[float, float] | None]


@dataclass(frozen=True)
class Plan:
    """How much is measured in one round."""

    connections: int = 16
    streams: int = 200
    seconds: float = 2.0


async def open_all(port: int, requests: int, make: Callable[[], Connection]) -> list[asyncio.Transport]:
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(make, "127.0.0.1", port) for _ in range(requests)]
    return [transport for transport, _ in made]


async def until(check: Callable[[], bool], tally: Tally, within: float) -> bool:
    """Whether it became true in time. Raises what went wrong in between."""
    loop = asyncio.get_running_loop()
    end = loop.time() + within
    while loop.time() < end:
        tally.check()
        if check():
            return True
        await asyncio.sleep(0.01)
    return False


async def let_finish(transports: list[asyncio.Transport], tally: Tally) -> None:
    """Send no more and read what is owed, so that no gateway is measured while it cleans up."""
    tally.is_over = True
    await until(lambda: tally.answers >= tally.sent, tally, 5.0)
    for transport in transports:
        transport.abort()
    tally.check()


async def ready(port: int, request: bytes, within: float, alive: Callable[[], bool]) -> None:
    """Wait until one request is answered with 200. Raises `Broken` when it never is."""
    loop = asyncio.get_running_loop()
    end, last = loop.time() + within, "nothing listens"
    while loop.time() < end:
        if not alive():
            raise Broken("it ended by itself")
        tally = Tally()
        tally.is_over = True  # one answer is enough
        try:
            transport, _ = await loop.create_connection(lambda: Caller(tally, request), "127.0.0.1", port)  # noqa: B023
        except OSError:
            await asyncio.sleep(0.05)
            continue
        try:
            if await until(lambda: tally.answers > 0, tally, 3.0):  # noqa: B023
                return
            last = "no answer within 3 s"
        except Broken as failure:
            last = str(failure)
        finally:
            transport.abort()
        await asyncio.sleep(0.1)
    raise Broken(f"not ready within {within:g} s: {last}")


async def closed_loop(
    port: int, pids: list[int], request: bytes, plan: Plan, seconds: float
) -> dict[str, float]:
    """CPU a request, and requests a second, with `connections` callers that never pause."""
    loop, tally = asyncio.get_running_loop(), Tally()
    transports = await open_all(port, plan.connections, lambda: Caller(tally, request))
    await until(lambda: tally.answers >= plan.connections, tally, 10.0)
    before, answered, began = cpu_us(pids), tally.answers, loop.time()
    await asyncio.sleep(seconds)
    spent, answers, took = cpu_us(pids) - before, tally.answers - answered, loop.time() - began
    await let_finish(transports, tally)
    if not answers:
        raise Broken("no request was answered")
    return {"request_us": spent / answers, "requests_per_s": answers / took, "busy": spent / took / 1e6}


async def paced(port: int, pids: list[int], request: bytes, plan: Plan) -> float:
    """CPU microseconds a request when PACE of them come evenly in a second."""
    loop, tally = asyncio.get_running_loop(), Tally()
    callers: list[PacedCaller] = []

    def caller() -> PacedCaller:
        callers.append(PacedCaller(tally, request))
        return callers[-1]

    transports = await open_all(port, plan.connections, caller)
    before, began, due = cpu_us(pids), loop.time(), 0
    while (now := loop.time() - began) < plan.seconds:
        while due < now * PACE:
            due += 1
            free = next((one for one in callers if one.is_free), None)
            if free is None:
                break  # it cannot keep this pace; what it answers is what is counted
            free.send()
        await asyncio.sleep(1 / PACE)
    spent, answers = cpu_us(pids) - before, tally.answers
    await let_finish(transports, tally)
    if not answers:
        raise Broken("no paced request was answered")
    return spent / answers


async def first_event(port: int, request: bytes, seconds: float) -> tuple[float, float] | None:
    """Median and 99th percentile of the time to the first event, in ms; one stream at a time.

    None where not even two streams began in that time.
    """
    tally = Tally()
    (transport,) = await open_all(port, 1, lambda: Prober(tally, request))
    await until(lambda: len(tally.first_bytes) >= PROBES + 1, tally, seconds)
    tally.is_over = True
    transport.abort()
    times = tally.first_bytes[1:]  # the first opens a connection
    if len(times) < 2:
        return None
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return cuts[49] * 1000, cuts[98] * 1000


async def streams(
    port: int, pids: list[int], token_ids: bool, plan: Plan, probes: Callable[[], Awaitable[Probes]]
) -> tuple[dict[str, float], Probes]:
    """CPU an event and resident memory while the streams run; then `probes` beside them.

    A gateway that cannot begin them all in time is measured with those that it began.
    """
    loop, tally = asyncio.get_running_loop(), Tally()
    events = int((plan.seconds * 8 + 2 * BEGIN_WITHIN) / INTERVAL)
    request = client.request(token_ids=token_ids, stream=True, tokens=events)
    listeners: list[Listener] = []

    def listener() -> Listener:
        listeners.append(Listener(tally, request))
        return listeners[-1]

    transports = await open_all(port, plan.streams, listener)
    try:
        await until(lambda: min(one.events for one in listeners) >= 3, tally, BEGIN_WITHIN)
        before, seen, began = cpu_us(pids), tally.events, loop.time()
        await asyncio.sleep(plan.seconds)
        # One that is overloaded by these streams needs longer to show what an event costs.
        await until(lambda: tally.events - seen >= EVENTS_MIN, tally, BEGIN_WITHIN)
        spent, arrived = cpu_us(pids) - before, tally.events - seen
        if not arrived:
            raise Broken("no event of any stream arrived")
        figures = {
            "chunk_us": spent / arrived,
            "chunks_per_s": arrived / (loop.time() - began),
            "streams_begun": sum(one.events > 0 for one in listeners),
            "resident_mb": resident_bytes(pids) / 1e6,
        }
        beside = await probes()
        tally.check()
    finally:
        tally.is_over = True
        for transport in transports:
            transport.abort()
    await asyncio.sleep(0.3)
    return figures, beside


async def one_round(gateway: Gateway, engine: int, plan: Plan) -> dict[str, float]:
    """Every figure of one gateway, once. Raises `Broken` when it does not work."""
    assert gateway.command is not None
    with tempfile.TemporaryDirectory() as name:
        directory, port = Path(name), free_port()
        command = gateway.command(engine, port, directory)
        log = directory / "log"
        with running(command.words, cores()[1], log=log, env=command.env) as child:
            try:
                warm = client.request(token_ids=gateway.token_ids, stream=False)
                await ready(port, warm, command.has_started_within, lambda: child.poll() is None)
                return await figures_of(gateway, port, tree(child.pid), engine, plan)
            except Broken as failure:
                tail = log.read_text("utf-8", "replace").strip().splitlines()[-1:]
                raise Broken(f"{failure} {tail[0][:300] if tail else ''}".strip()) from None


async def figures_of(
    gateway: Gateway, port: int, pids: list[int], engine: int, plan: Plan
) -> dict[str, float]:
    whole = client.request(token_ids=gateway.token_ids, stream=False)
    short = client.request(token_ids=gateway.token_ids, stream=True, tokens=1)
    await closed_loop(port, pids, whole, plan, 0.3)  # connections, caches, branches
    figures = {"idle_mb": resident_bytes(pids) / 1e6}
    figures |= await closed_loop(port, pids, whole, plan, plan.seconds)
    figures["paced_request_us"] = await paced(port, pids, whole, plan)
    direct = await closed_loop(engine, [], whole, plan, min(1.0, plan.seconds))
    figures["direct_requests_per_s"] = direct["requests_per_s"]

    async def probes() -> Probes:
        return [await first_event(at, short, 3 * plan.seconds) for at in (engine, port)]

    alone = await probes()
    while_streaming, beside = await streams(port, pids, gateway.token_ids, plan, probes)
    figures |= while_streaming
    for label, (straight, through) in (("alone", alone), ("beside_streams", beside)):
        for index, quantile in enumerate(("p50", "p99")):
            if straight is not None and through is not None:
                figures[f"ttft_{label}_{quantile}_ms"] = through[index] - straight[index]
                figures[f"ttft_direct_{label}_{quantile}_ms"] = straight[index]
    return figures
