"""The middleware in front of applications: each framework, each server, each order of middlewares."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from asgi_servers import SERVERS, Running

from kvgate import Admission, PoolFacts, Tenant
from kvgate.asgi import AdmissionMiddleware, fields
from kvgate.wire.engines.known import ENGINES

APPS = ("fastapi_app", "starlette_app", "litestar_app")
WITHIN = 10.0
HELD = {"reserved_blocks": 0, "live": 0, "waiting": 0, "double_releases": 0, "running": 0}


@pytest.fixture(scope="module", params=[(server, app) for server in SERVERS for app in APPS], ids="-".join)
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    with Running(*request.param, TEST_MAX_WAIT="30") as server:
        yield server


def ask(server: Running, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/generate", json={"prompt": "hello"} | body, timeout=60)


def until(server: Running, **wanted: int) -> dict[str, Any]:
    """What the application has seen, once it is as wanted."""
    end = time.monotonic() + WITHIN
    while True:
        seen = httpx.get(f"{server.url}/seen", timeout=30).json()
        if all(seen[name] == value for name, value in wanted.items()):
            return dict(seen)
        assert time.monotonic() < end, seen
        time.sleep(0.02)


def test_the_cap_is_enforced_and_told_and_the_length_is_right(running: Running) -> None:
    answer = ask(running, max_tokens=20)
    assert answer.status_code == 200
    assert answer.json()["cap"] == 20
    assert answer.json()["length"] == str(answer.json()["bytes"])
    assert (answer.headers["x-kvgate-output-cap"], answer.headers["x-kvgate-reserved-blocks"]) == ("20", "24")
    assert ask(running).json()["error"]["code"] == "kv_capacity_exceeded"
    until(running, **HELD)


def test_a_refusal_is_the_one_of_the_gateway(running: Running) -> None:
    never = ask(running, max_tokens=500)
    assert never.status_code == 413
    assert never.json()["error"]["output_cap_that_fits"] == 96
    assert never.headers["x-should-retry"] == "false"
    wrong = ask(running, max_tokens="many")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "max_tokens")


def test_a_stream_comes_piece_by_piece(running: Running) -> None:
    body = {"prompt": "hello", "max_tokens": 3, "stream": True, "pause": 0.05}
    moments = []
    with httpx.stream("POST", f"{running.url}/generate", json=body, timeout=60) as answer:
        assert answer.headers["x-kvgate-output-cap"] == "3"
        for _ in answer.iter_raw():
            moments.append(time.monotonic())
    assert len(moments) >= 3
    assert moments[-1] - moments[0] > 0.05
    until(running, **HELD)


def test_what_is_not_priced_goes_through_untouched(running: Running) -> None:
    answer = httpx.post(f"{running.url}/free", content=b"x" * 1000)
    assert (answer.status_code, answer.json()) == (200, {"bytes": 1000})
    assert "x-kvgate-output-cap" not in answer.headers


def test_another_spelling_of_the_path_does_not_go_by(running: Running) -> None:
    for path in ("/generate/", "//generate", "/%67enerate"):
        answer = httpx.post(f"{running.url}{path}", json={"prompt": "hello", "max_tokens": 500})
        assert answer.status_code == 413, path


def test_a_large_body_is_read_once_and_replayed(running: Running) -> None:
    """50 MB on each server; the frameworks take its size from the server."""
    size = 50_000_000 if running.app == "starlette_app" else 2_000_000
    body = b'{"prompt": "hello", "max_tokens": 500, "more": "' + b"x" * size + b'"}'
    fits = body.replace(b'"max_tokens": 500', b'"max_tokens": 20 ')
    answer = httpx.post(f"{running.url}/generate", content=fits, timeout=120)
    assert answer.json()["bytes"] == len(fits)
    refused = httpx.post(f"{running.url}/generate", content=body, timeout=120)
    assert refused.status_code == 413
    until(running, **HELD)


def test_who_does_not_fit_waits_for_who_does(running: Running) -> None:
    body = {"prompt": "hello", "max_tokens": 60, "stream": True, "pause": 0.1}
    with ThreadPoolExecutor(1) as threads:
        with httpx.stream("POST", f"{running.url}/generate", json=body, timeout=60) as first:
            assert first.status_code == 200
            waiting = threads.submit(ask, running, max_tokens=60)
            until(running, waiting=1)
        second = waiting.result(60)
    assert second.status_code == 200
    assert int(second.headers["x-kvgate-wait-ms"]) > 0
    until(running, **HELD)


def test_a_client_that_leaves_frees_the_application_and_the_pool(running: Running) -> None:
    before = until(running, **HELD)["disconnects"]
    body = {"prompt": "hello", "max_tokens": 90, "stream": True, "pause": 0.1}
    with httpx.stream("POST", f"{running.url}/generate", json=body, timeout=60) as answer:
        next(answer.iter_raw())
    until(running, **HELD, disconnects=before + 1)


def test_a_client_that_leaves_the_line_is_not_served(running: Running) -> None:
    body = {"prompt": "hello", "max_tokens": 90, "stream": True, "pause": 0.1}
    with httpx.stream("POST", f"{running.url}/generate", json=body, timeout=60):
        admitted = until(running, live=1)["admissions"]
        with httpx.Client() as leaving, pytest.raises(httpx.ReadTimeout):
            leaving.post(f"{running.url}/generate", json=body, timeout=0.1)
        until(running, waiting=0, live=1)
    assert until(running, **HELD)["admissions"] == admitted


@pytest.mark.parametrize("server", ["uvicorn", "hypercorn"])
@pytest.mark.parametrize("order", ["above", "below", "both"])
def test_a_disconnect_passes_base_http_middleware_above_and_below(server: str, order: str) -> None:
    """FC-21."""
    with Running(server, "fastapi_app", TEST_ORDER=order) as running:
        assert ask(running, max_tokens=20).headers["x-touched"] == "yes"
        body = {"prompt": "hello", "max_tokens": 90, "stream": True, "pause": 0.1}
        with httpx.stream("POST", f"{running.url}/generate", json=body, timeout=60) as answer:
            next(answer.iter_raw())
        until(running, **HELD, disconnects=1)


# --- the same without a server


class Fake:
    """A server's side of one request."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.messages = list(messages)
        self.sent: list[dict[str, Any]] = []
        self.never = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if not self.messages:
            await self.never.wait()
        return self.messages.pop(0)

    async def send(self, message: Any) -> None:
        self.sent.append(dict(message))

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def error(self) -> dict[str, Any]:
        return dict(json.loads(self.sent[1]["body"])["error"])


def posted(body: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def scope(path: str = "/generate", **more: Any) -> dict[str, Any]:
    shown = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    return shown | {"root_path": ""} | more


DISCONNECT = {"type": "http.disconnect"}
App = Callable[[Any, Any, Any], Awaitable[None]]


def pool(**options: Any) -> Admission:
    return Admission.from_blocks(100, 1, 1000, safety_fraction=1.0, **options)


def wrapped(app: App, gate: Admission, **options: Any) -> AdmissionMiddleware:
    own = {"routes": {"/generate": fields()}, "count": lambda shape: 10, "workers": "own_pool"}
    return AdmissionMiddleware(app, gate, **own | options)


async def answering(scope: Any, receive: Any, send: Any) -> None:
    """Reads, answers with what it got, and works on for a while."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def test_the_room_is_given_back_with_the_end_of_the_answer_not_of_the_application() -> None:
    gate = pool()
    held = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answering(scope, receive, send)
        held.append(gate.snapshot()["live"])  # a background task would run here

    fake = Fake(posted(b'{"prompt": "x", "max_tokens"', more=True), posted(b": 20}"))
    await wrapped(app, gate)(scope(), fake.receive, fake.send)
    assert held == [0]
    assert json.loads(fake.sent[1]["body"]) == {"prompt": "x", "max_tokens": 20}


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError, GeneratorExit])
async def test_an_application_that_fails_gives_back_its_room(error: type[BaseException]) -> None:
    gate = pool()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert gate.snapshot()["live"] == 1
        raise error

    fake = Fake(posted(b'{"prompt": "x", "max_tokens": 20}'))
    with pytest.raises(error):
        await wrapped(app, gate)(scope(), fake.receive, fake.send)
    assert gate.snapshot()["reserved_blocks"] == 0


async def test_the_disconnect_reaches_an_application_even_where_it_came_with_the_grant() -> None:
    gate = pool()
    got = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        got.extend([await receive(), await receive(), await receive()])

    fake = Fake(posted(b'{"prompt": "x", "max_tokens": 20}'), DISCONNECT, DISCONNECT)
    await wrapped(app, gate)(scope(), fake.receive, fake.send)
    assert [message["type"] for message in got] == ["http.request", "http.disconnect", "http.disconnect"]
    assert gate.snapshot()["reserved_blocks"] == 0


async def test_a_client_that_leaves_while_it_uploads_is_forgotten() -> None:
    gate = pool()
    fake = Fake(posted(b'{"prompt": ', more=True), DISCONNECT)
    await wrapped(answering, gate)(scope(), fake.receive, fake.send)
    assert (fake.sent, gate.snapshot()["admissions"]) == ([], 0)


async def test_cancelled_in_the_line_nothing_is_left() -> None:
    gate = pool()
    app = wrapped(answering, gate, max_wait=30)
    async with gate.admit(10, 80):
        fake = Fake(posted(b'{"prompt": "x", "max_tokens": 20}'))
        task = asyncio.create_task(app(scope(), fake.receive, fake.send))
        while gate.snapshot()["waiting"] == 0:  # noqa: ASYNC110
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert gate.snapshot()["waiting"] == 0
    assert gate.snapshot()["reserved_blocks"] == 0


async def test_a_body_above_the_limit_is_refused_by_its_length_or_its_bytes() -> None:
    app = wrapped(answering, pool(), body_bytes_max=50)
    told = Fake()
    await app(scope(headers=[(b"content-length", b"51")]), told.receive, told.send)
    untold = Fake(posted(b"x" * 30, more=True), posted(b"x" * 30))
    await app(scope(), untold.receive, untold.send)
    assert [(fake.status, fake.error["code"]) for fake in (told, untold)] == [(413, "body_too_large")] * 2


async def test_other_paths_and_web_sockets_can_be_refused() -> None:
    app = wrapped(answering, pool(), others="refuse", allow_paths=["/login"])
    unknown = Fake(posted(b"{}"))
    await app(scope("/v2/generate"), unknown.receive, unknown.send)
    assert (unknown.status, unknown.error["code"]) == (403, "unpriced_endpoint")
    allowed = Fake(posted(b"{}"))
    await app(scope("/login/"), allowed.receive, allowed.send)
    assert allowed.status == 200
    read = Fake(posted(b""))
    await app(scope("/v2/generate", method="GET"), read.receive, read.send)
    assert read.status == 200
    socket = Fake({"type": "websocket.connect"})
    await app(scope(type="websocket"), socket.receive, socket.send)
    assert socket.sent == [{"type": "websocket.close", "code": 1008}]


async def test_what_generates_anywhere_does_not_go_by_unpriced_unless_its_owner_says_so() -> None:
    """The default for paths that nobody named."""
    unnamed = (
        "/v1/audio/transcriptions",
        "/v1/realtime",
        "/api/generate",  # of another engine than the one that is named
        "/generate_stream",
        "/llm/v1/chat/completions",
        "//llm/v1/messages/",
    )
    own = {"routes": {}, "allow_paths": ["/v1/images/generations", "/proxy/v1/completions"]}
    app = wrapped(answering, pool(), **own)
    for path in unnamed:
        fake = Fake(posted(b"{}"))
        await app(scope(path), fake.receive, fake.send)
        assert (fake.status, fake.error["code"]) == (403, "unpriced_endpoint"), path
        assert "routes=" in fake.error["message"]
    socket = Fake({"type": "websocket.connect"})
    await app(scope("/v1/realtime", type="websocket"), socket.receive, socket.send)
    assert socket.sent == [{"type": "websocket.close", "code": 1008}]
    for path in ("/v1/images/generations", "/proxy/v1/completions", "/login", "/v1/users", "/v1/models/x"):
        fake = Fake(posted(b"{}"))
        await app(scope(path), fake.receive, fake.send)
        assert fake.status == 200, path


async def test_every_path_that_an_engine_generates_under_is_priced_or_refused_by_default() -> None:
    generating = {path.decode() for engine in ENGINES.values() for path in engine.routes}
    assert len(generating) > 30
    for name, engine in ENGINES.items():
        app = wrapped(answering, pool(), engine=name, routes={})
        for path in generating - {path.decode() for path in engine.routes}:
            fake = Fake(posted(b"{}"))
            await app(scope(path), fake.receive, fake.send)
            assert fake.status in (400, 403), (name, path)


async def test_a_mounted_application_is_priced_under_both_of_its_paths() -> None:
    app = wrapped(answering, pool())
    for path, root in (("/models/generate", "/models"), ("/generate", "/models")):
        fake = Fake(posted(b'{"prompt": "x", "max_tokens": 500}'))
        await app(scope(path, root_path=root), fake.receive, fake.send)
        assert fake.status == 413, path


async def test_openai_and_anthropic_paths_are_priced_and_refused_in_their_own_form() -> None:
    app = wrapped(answering, pool(), routes={"/own/chat": "chat"})
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 500}
    for path in ("/v1/chat/completions", "/own/chat", "/v1/messages"):
        fake = Fake(posted(json.dumps(chat).encode()))
        await app(scope(path), fake.receive, fake.send)
        assert (fake.status, fake.error["code"]) == (413, "kv_capacity_exceeded"), path
        assert ("type" in json.loads(fake.sent[1]["body"])) == (path == "/v1/messages")
    with pytest.raises(ValueError, match="there are chat, completion"):
        wrapped(answering, pool(), routes={"/x": "chatt"})
    with pytest.raises(ValueError, match="there are generic"):
        wrapped(answering, pool(), engine="vlmm")


async def test_without_a_counter_the_bound_is_never_too_low() -> None:
    gate = Admission.from_blocks(1000, 1, 1000, safety_fraction=1.0)
    blocks = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        blocks.append(gate.snapshot()["reserved_blocks"])

    for prompt, least in (("tök漢", 7), ([1, 2, 3], 3)):
        fake = Fake(posted(json.dumps({"prompt": prompt, "max_tokens": 1}).encode()))
        await wrapped(app, gate, count=None)(scope(), fake.receive, fake.send)
        assert least <= blocks.pop() <= least + 8


async def test_a_counter_may_be_asynchronous_and_tenants_are_told_apart() -> None:
    async def count(shape: Any) -> list[int]:
        return [50]

    gate = pool()
    limited = {"count": count, "tenant": lambda scope: Tenant("small", ceiling=10)}
    fake = Fake(posted(b'{"prompt": "x", "max_tokens": 20}'))
    await wrapped(answering, gate, **limited)(scope(), fake.receive, fake.send)
    assert (fake.status, fake.error["needed_tokens"]) == (413, 69)


# --- several processes


@pytest.mark.parametrize("server", SERVERS)
def test_the_pool_is_divided_by_the_workers_that_the_server_was_told_of(server: str) -> None:
    """FC-51."""
    with Running(server, "starlette_app", "--workers", "2") as running:
        answer = ask(running, max_tokens=80)
    assert (answer.status_code, answer.json()["error"]["usable_tokens"]) == (413, 50)


@pytest.mark.parametrize("server", ["uvicorn", "hypercorn"])
def test_refused_instead_of_divided_the_server_does_not_start_and_says_why(server: str) -> None:
    with Running(server, "starlette_app", "--workers", "2", waits=False, TEST_WORKERS="refuse") as running:
        said = running.until_it_says("would each give out the pool")
    assert "workers=" in said


def test_workers_that_nobody_told_of_are_noticed_by_the_second() -> None:
    """hypercorn takes their number from a file, which no command line shows."""
    config = ("--config", "python:asgi_workers")
    with Running("hypercorn", "starlette_app", *config, waits=False) as running:
        running.until_it_says("tell kvgate how many there are: workers=N divides the pool by N")


def test_told_how_many_they_are_the_same_workers_have_a_share_each() -> None:
    config = ("--config", "python:asgi_workers")
    with Running("hypercorn", "starlette_app", *config, TEST_WORKERS="2") as running:
        answer = ask(running, max_tokens=80)
    assert (answer.status_code, answer.json()["error"]["usable_tokens"]) == (413, 50)


def test_a_pool_that_is_too_small_to_divide_is_not_served() -> None:
    app = AdmissionMiddleware(answering, PoolFacts(2, 1, 100), workers=3)
    fake = Fake(posted(b'{"prompt": "x"}'))
    asyncio.run(app(scope("/v1/completions"), fake.receive, fake.send))
    assert fake.status == 503
    assert "cannot be divided by 3 workers" in fake.error["message"]
