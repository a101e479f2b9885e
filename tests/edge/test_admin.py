"""The admin server over a gateway that is a plain object: what each page says, and when it fails."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvgate.core.records import Ending, Reason
from kvgate.edge.admin import AdminServer
from kvgate.edge.relay.finished import Finished
from kvgate.edge.reload import CannotReload

SNAPSHOT = """{
  "version": "0.1.0", "uptime_seconds": 1.5, "ready": true, "draining": false,
  "pools": [{
    "engine": "vllm", "upstream": "a:1", "up": true,
    "total_blocks": 100, "usable_blocks": 90, "reserved_blocks": 40, "free_blocks": 50,
    "block_size": 16, "live": 3, "waiting": 2, "context": 4096, "max_seqs": 8, "reserved_seqs": 3
  }],
  "counters": {
    "requests": 12, "admissions": 7, "double_releases": 0, "moves": 3,
    "refusals": {"kv_capacity": 5}, "releases": {"completed": 4}
  }
}"""


class FakeGateway:
    """Figures that a test sets, and the thread that reads them."""

    def __init__(self) -> None:
        self.observers: list[Callable[[Any], None]] = []
        self.ready = True
        self.asked: list[tuple[str, bytes]] = []
        self.threads: set[threading.Thread] = set()
        self.explain_error: Exception | None = None

    def snapshot(self) -> dict[str, Any]:
        self.threads.add(threading.current_thread())
        return json.loads(SNAPSHOT) | {"ready": self.ready}

    async def explain(self, path: str, body: bytes) -> dict[str, Any]:
        self.threads.add(threading.current_thread())
        if self.explain_error is not None:
            raise self.explain_error
        self.asked.append((path, body))
        return {"decision": "admit", "prompt_tokens": 3}


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def request(
    port: int, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> Answer:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as client:
        client.request(method, path, body, headers or {})
        response = client.getresponse()
        names = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, names, response.read())


@dataclass
class Running:
    gateway: FakeGateway
    admin: AdminServer

    def __call__(self, method: str, path: str, *args: Any, **kw: Any) -> Awaitable[Answer]:
        return asyncio.to_thread(request, self.admin.port, method, path, *args, **kw)

    async def samples(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        text = (await self("GET", "/metrics")).body.decode()
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[Running]:
    gateway = FakeGateway()
    admin = AdminServer(gateway, "127.0.0.1", 0, **options)
    await admin.start()
    try:
        yield Running(gateway, admin)
    finally:
        await admin.stop()


def run(test: Callable[[Running], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with running(**options) as server:
            await test(server)

    asyncio.run(main())


def test_status_is_the_snapshot_of_the_gateway() -> None:
    async def test(ask: Running) -> None:
        answer = await ask("GET", "/status")
        assert answer.status == 200
        assert answer.headers["content-type"] == "application/json"
        assert answer.json() == ask.gateway.snapshot()

    run(test)


def test_the_gateway_is_read_only_on_its_own_loop() -> None:
    async def test(ask: Running) -> None:
        await ask("GET", "/status")
        await ask("GET", "/metrics")
        await ask("POST", "/explain", b"{}")
        assert ask.gateway.threads == {threading.current_thread()}

    run(test)


def test_ready_follows_the_gateway_and_health_does_not() -> None:
    async def test(ask: Running) -> None:
        assert (await ask("GET", "/readyz")).status == 200
        ask.gateway.ready = False
        assert (await ask("GET", "/readyz")).status == 503
        assert (await ask("GET", "/healthz")).status == 200

    run(test)


def test_health_fails_in_bounded_time_while_the_loop_is_stuck() -> None:
    async def test(ask: Running) -> None:
        asked: list[Answer] = []
        thread = threading.Thread(target=lambda: asked.append(request(ask.admin.port, "GET", "/healthz")))
        thread.start()
        # Blocking the loop is the case under test: the thread gets its answer meanwhile.
        thread.join(5)
        assert [answer.status for answer in asked] == [503]
        assert "did not answer" in asked[0].json()["error"]["message"]

    run(test, loop_wait=0.1)


def test_metrics_show_the_pool_with_its_engine() -> None:
    async def test(ask: Running) -> None:
        samples = await ask.samples()
        pool = {"reserved_blocks": 40, "usable_blocks": 90, "total_blocks": 100, "live_reservations": 3}
        for name, value in (pool | {"waiting_requests": 2}).items():
            assert samples[f"kvgate_{name}", (("engine", "vllm"), ("upstream", "a:1"))] == value
        assert samples["kvgate_admissions_total", ()] == 7
        assert samples["kvgate_double_release_total", ()] == 0

    run(test)


def test_every_reason_and_every_cause_is_there_from_the_start() -> None:
    async def test(ask: Running) -> None:
        samples = await ask.samples()
        for reason in Reason:
            expected = 5 if reason is Reason.KV_CAPACITY else 0
            assert samples["kvgate_refusals_total", (("reason", reason.value),)] == expected
        for ending in Ending:
            expected = 4 if ending is Ending.COMPLETED else 0
            assert samples["kvgate_releases_total", (("cause", ending.value),)] == expected

    run(test)


def test_finished_requests_fill_the_histograms() -> None:
    async def test(ask: Running) -> None:
        for observer in ask.gateway.observers:
            observer(Finished("completed", 3.0, 0.2))
            observer(Finished("cancelled", 0.3, 0.0))
        samples = await ask.samples()
        assert samples["kvgate_request_seconds_count", (("outcome", "completed"),)] == 1
        assert samples["kvgate_request_seconds_sum", (("outcome", "completed"),)] == 3.0
        assert samples["kvgate_request_seconds_count", (("outcome", "cancelled"),)] == 1
        assert samples["kvgate_wait_seconds_count", ()] == 2

    run(test)


def test_two_gateways_in_one_process_do_not_share_figures() -> None:
    async def test(ask: Running) -> None:
        async with running() as other:
            other.gateway.observers[0](Finished("completed", 1.0, 0.0))
            assert (await other.samples())["kvgate_wait_seconds_count", ()] == 1
            assert (await ask.samples())["kvgate_wait_seconds_count", ()] == 0

    run(test)


def test_explain_hands_path_and_body_to_the_gateway() -> None:
    async def test(ask: Running) -> None:
        answer = await ask("POST", "/explain?path=/v1/completions", b'{"prompt": "x"}')
        assert (answer.status, answer.json()["decision"]) == (200, "admit")
        await ask("POST", "/explain", b"not json")
        assert ask.gateway.asked[0] == ("/v1/completions", b'{"prompt": "x"}')
        assert ask.gateway.asked[1] == ("/v1/chat/completions", b"not json")

    run(test)


@pytest.mark.parametrize(
    ("error", "status"), [(ConnectionRefusedError("engine is down"), 502), (KeyError("bug"), 500)]
)
def test_an_explanation_that_fails_says_why(error: Exception, status: int) -> None:
    async def test(ask: Running) -> None:
        ask.gateway.explain_error = error
        answer = await ask("POST", "/explain", b"{}")
        assert answer.status == status
        assert str(error.args[0]) in answer.json()["error"]["message"]

    run(test)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/v1/chat/completions", 404),
        ("GET", "/explain", 405),
        ("GET", "/reload", 405),
        ("POST", "/status", 405),
        ("DELETE", "/status", 501),
    ],
)
def test_what_is_not_there_is_refused_in_json(method: str, path: str, status: int) -> None:
    async def test(ask: Running) -> None:
        answer = await ask(method, path)
        assert answer.status == status
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["error"]["code"] == status

    run(test)


@pytest.mark.parametrize(("length", "status"), [("x", 411), (str(10**12), 413)])
def test_an_odd_or_huge_body_length_is_refused_unread(length: str, status: int) -> None:
    async def test(ask: Running) -> None:
        answer = await ask("POST", "/explain", None, {"content-length": length})
        assert (answer.status, answer.headers["connection"]) == (status, "close")

    run(test)


def test_a_reload_is_run_on_the_gateways_loop_and_its_result_is_shown() -> None:
    threads: list[threading.Thread] = []

    def reload() -> dict[str, Any]:
        threads.append(threading.current_thread())
        return {"changed": {"max_wait": {"from": 0.0, "to": 2.0}}, "needs_restart": {}}

    async def test(ask: Running) -> None:
        answer = await ask("POST", "/reload", b"")
        assert (answer.status, answer.json()) == (200, reload())
        assert set(threads) == {threading.current_thread()}

    run(test, reload=reload)


def test_a_reload_that_cannot_be_done_says_why_and_one_with_a_body_is_no_reload() -> None:
    def reload() -> dict[str, Any]:
        raise CannotReload("kvgate.toml: no such option")

    async def test(ask: Running) -> None:
        answer = await ask("POST", "/reload", b"")
        assert answer.status == 400
        assert "nothing was changed: kvgate.toml: no such option" in answer.json()["error"]["message"]
        assert (await ask("POST", "/reload", b"max-wait = 1")).status == 404

    run(test, reload=reload)


def test_a_gateway_without_options_has_nothing_to_reload() -> None:
    async def test(ask: Running) -> None:
        assert (await ask("POST", "/reload", b"")).status == 400

    run(test)


def test_head_has_the_headers_of_get_and_no_body() -> None:
    async def test(ask: Running) -> None:
        answer = await ask("HEAD", "/readyz")
        assert (answer.status, answer.body) == (200, b"")
        assert int(answer.headers["content-length"]) > 0

    run(test)


def test_a_taken_port_is_an_os_error_at_the_start() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            admin = AdminServer(FakeGateway(), "127.0.0.1", taken.getsockname()[1])
            with pytest.raises(OSError):
                await admin.start()
            await admin.stop()

    asyncio.run(main())


def test_a_stopped_server_has_closed_its_port_and_left_the_gateway() -> None:
    async def main() -> None:
        gateway = FakeGateway()
        admin = AdminServer(gateway, "127.0.0.1", 0)
        await admin.start()
        await admin.stop()
        await admin.stop()
        assert gateway.observers == []
        with pytest.raises(ConnectionRefusedError):
            await asyncio.to_thread(request, admin.port, "GET", "/healthz")

    asyncio.run(main())
