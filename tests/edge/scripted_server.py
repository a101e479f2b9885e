"""A small HTTP server that gives the next of its scripted answers to each request, and keeps the requests."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CHAT_ANSWER = {
    "id": "c1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}],
}
MESSAGE_ANSWER = {
    "id": "m1",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [{"type": "text", "text": "hello"}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 1, "output_tokens": 1},
}


@dataclass(slots=True)
class Said:
    """One scripted answer. `cut`: bytes of the body after which the connection is closed."""

    status: int = 200
    body: Any = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None


def refusal(
    milliseconds: int = 20, *, fits: int | None = None, status: int = 429, text: str = "full"
) -> Said:
    error = {"message": text, "type": "rate_limit_error", "code": "kv_capacity", "output_cap_that_fits": fits}
    headers = {"Retry-After": "1", "retry-after-ms": str(milliseconds), "x-kvgate-reason": "kv_capacity"}
    return Said(status, {"error": error}, headers)


@dataclass(slots=True)
class Seen:
    at: float
    path: str
    headers: dict[str, str]
    body: Any


@dataclass(slots=True)
class Server:
    url: str
    seen: list[Seen] = field(default_factory=list)
    left: list[Said] = field(default_factory=list)

    @property
    def gaps(self) -> list[float]:
        return [b.at - a.at for a, b in zip(self.seen, self.seen[1:], strict=False)]


@contextmanager
def serving(*answers: Said) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            server.seen.append(Seen(time.monotonic(), self.path, headers, json.loads(body or b"null")))
            said = server.left.pop(0)
            text = said.body if isinstance(said.body, bytes) else json.dumps(said.body).encode()
            self.send_response(said.status)
            for name, value in {"content-type": "application/json", **said.headers}.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text[: said.cut])
            if said.cut is not None:
                self.close_connection = True

        def log_message(self, *args: Any) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = Server(f"http://127.0.0.1:{httpd.server_port}", left=list(answers))
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()
