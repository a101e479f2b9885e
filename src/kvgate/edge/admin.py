"""The admin server: health, status, metrics and explanations, on a port of its own.

It runs in a thread, so that a scrape is rendered beside the relay and not in it, and so that it can
say so when the relay's loop no longer answers. Everything it shows is read on that loop, within a
bounded time; all it changes is what POST /reload reads out of the operator's own file. It has no
password: keep the port private.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import socket
import socketserver
import threading
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qs, urlsplit

from kvgate.edge.observing.telemetry import CONTENT_TYPE, Snapshot, Telemetry
from kvgate.edge.reload import CannotReload

T = TypeVar("T")

# A loop that is late by this much serves no stream well: call it stuck.
LOOP_WAIT = 2.0
# Counting a prompt on the engine is part of an explanation, and an engine may be busy.
EXPLAIN_WAIT = 30.0
# Silence of a client after which its thread is given up.
CLIENT_WAIT = 10.0
EXPLAIN_BODY_LIMIT = 64 * 1024 * 1024
DEFAULT_PATH = "/v1/chat/completions"


class LoopStuck(Exception):
    """The gateway's loop did not answer in time."""


class EngineTrouble(Exception):
    """The engine could not be asked."""


class Gatewayish(Protocol):
    """What the admin server needs of a gateway."""

    observers: list[Callable[[Any], None]]

    @property
    def ready(self) -> bool: ...
    def snapshot(self) -> Snapshot: ...
    def explain(self, path: str, body: bytes) -> Awaitable[dict[str, Any]]: ...


class AdminServer:
    """Serves one gateway's figures at `host:port`; port 0 takes a free one, told by `.port`."""

    def __init__(
        self,
        gateway: Gatewayish,
        host: str,
        port: int,
        *,
        loop_wait: float = LOOP_WAIT,
        reload: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self.port = port
        self._reload = reload
        self._gateway = gateway
        self._host = host
        self._loop_wait = loop_wait
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: _Server | None = None
        self.telemetry = Telemetry(self.snapshot)

    async def start(self) -> None:
        """Bind and answer. OSError when the address cannot be had."""
        self._loop = asyncio.get_running_loop()
        self._server = _Server(self._host, self.port, self)
        self.port = self._server.server_address[1]
        self._know_tenants()
        self._gateway.observers.append(self.telemetry.observe)
        threading.Thread(
            target=self._server.serve_forever, args=(0.2,), name="kvgate-admin", daemon=True
        ).start()

    async def stop(self) -> None:
        """Close the port. Twice is once."""
        server, self._server = self._server, None
        if server is not None:
            self._gateway.observers.remove(self.telemetry.observe)
            await asyncio.to_thread(server.shutdown)
            server.server_close()

    def _know_tenants(self) -> None:
        self.telemetry.tenants.know(self._gateway.snapshot().get("tenants", ()))

    # From here on: called in the server's threads.

    def snapshot(self) -> Snapshot:
        """The gateway's figures at one moment of its loop."""
        return self._on_loop(self._gateway.snapshot)

    def ready(self) -> bool:
        return self._on_loop(lambda: self._gateway.ready)

    def reload(self) -> dict[str, Any]:
        """Read the options again. Raises `CannotReload`; then nothing has changed."""
        if self._reload is None:
            raise CannotReload("this gateway was not started from options that could be read again")
        reload = self._reload

        def reload_and_know() -> dict[str, Any]:
            told = reload()
            self._know_tenants()
            return told

        return self._on_loop(reload_and_know)

    def explain(self, path: str, body: bytes) -> dict[str, Any]:
        async def ask() -> dict[str, Any]:
            try:
                return await self._gateway.explain(path, body)
            except OSError as failed:
                # The engine's trouble, not to be taken for that of the client's own socket.
                raise EngineTrouble(str(failed)) from failed

        asking = ask()
        try:
            future = asyncio.run_coroutine_threadsafe(asking, self._running_loop())
        except RuntimeError:
            asking.close()
            raise LoopStuck("the gateway has stopped") from None
        return self._wait(future, EXPLAIN_WAIT)

    def _on_loop(self, call: Callable[[], T]) -> T:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            # Asked too late: nobody waits any more.
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call())
            except Exception as failed:
                future.set_exception(failed)

        try:
            self._running_loop().call_soon_threadsafe(run)
        except RuntimeError:
            raise LoopStuck("the gateway has stopped") from None
        return self._wait(future, self._loop_wait)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise RuntimeError("not started")
        return self._loop

    @staticmethod
    def _wait(future: concurrent.futures.Future[T], seconds: float) -> T:
        try:
            return future.result(seconds)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise LoopStuck(f"the gateway did not answer within {seconds:g} s") from None
        except concurrent.futures.CancelledError:
            raise LoopStuck("the gateway is stopping") from None


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    # Not http.server's own: it looks the host's name up in DNS when it binds.
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, admin: AdminServer) -> None:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self.address_family = family
        self.admin = admin
        super().__init__((str(address[0]), port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no event worth a traceback."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "kvgate"
    sys_version = ""
    timeout = CLIENT_WAIT
    server: _Server

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_HEAD(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _get(self, path: str) -> None:
        admin = self.server.admin
        if path == "/healthz":
            admin.ready()
            self._json(HTTPStatus.OK, {"status": "ok"})
        elif path == "/readyz":
            ready = admin.ready()
            status = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
            self._json(status, {"ready": ready})
        elif path == "/status":
            self._json(HTTPStatus.OK, admin.snapshot())
        elif path == "/metrics":
            self._send(HTTPStatus.OK, CONTENT_TYPE, admin.telemetry.render())
        elif path == "/explain":
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "POST the request's JSON body to /explain")
        elif path == "/reload":
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "POST to /reload, without a body")
        else:
            self._refuse(HTTPStatus.NOT_FOUND, UNKNOWN)

    def _post(self, path: str) -> None:
        # Whatever is refused below leaves its body unread, so the connection cannot be used again.
        self.close_connection = True
        if path == "/reload" and self.headers.get("content-length", "0") == "0":
            self.close_connection = False
            self._json(HTTPStatus.OK, self.server.admin.reload())
            return
        if path != "/explain":
            known = path in ("/healthz", "/readyz", "/status", "/metrics")
            status = HTTPStatus.METHOD_NOT_ALLOWED if known else HTTPStatus.NOT_FOUND
            self._refuse(status, f"GET {path}" if known else UNKNOWN)
            return
        length = self.headers.get("content-length", "")
        if not (length.isascii() and length.isdigit()):
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "send the body with a Content-Length")
            return
        if int(length) > EXPLAIN_BODY_LIMIT:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {EXPLAIN_BODY_LIMIT} bytes")
            return
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            return  # the client left half way
        self.close_connection = False
        asked = parse_qs(urlsplit(self.path).query).get("path", [DEFAULT_PATH])[-1]
        self._json(HTTPStatus.OK, self.server.admin.explain(asked, body))

    def _answer(self, handle: Callable[[str], None]) -> None:
        try:
            handle(urlsplit(self.path).path)
        except CannotReload as wrong:
            self._refuse(HTTPStatus.BAD_REQUEST, f"nothing was changed: {wrong}")
        except LoopStuck as stuck:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(stuck))
        except EngineTrouble as trouble:
            self._refuse(HTTPStatus.BAD_GATEWAY, f"the engine could not be asked: {trouble}")
        except OSError:
            self.close_connection = True  # the client's socket; nobody is left to tell
        except Exception as failed:
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(failed).__name__}: {failed}")

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        self._json(status, {"error": {"message": message, "type": status.phrase, "code": int(status)}})

    def _json(self, status: HTTPStatus, value: object) -> None:
        self._send(status, "application/json", json.dumps(value).encode() + b"\n")

    def _send(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class refuses itself (bad request lines, odd methods): JSON as well."""
        self.close_connection = True
        self._refuse(HTTPStatus(code), message or HTTPStatus(code).phrase)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: health checks every second are no news."""


UNKNOWN = "no such page; there are /healthz, /readyz, /status, /metrics, POST /explain and POST /reload"
