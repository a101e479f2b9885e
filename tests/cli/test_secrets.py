"""Keys and prompts pass through and are written nowhere: not to a log, a page, a metric or an error."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from test_serve import PATIENCE, Serving, process, sizes

KEY, PROMPT = "sk-secret-4711", "the-prompt-0815"
FAULTS: list[dict[str, Any]] = [
    {},
    {"fault": "500"},
    {"fault": "close_before_headers"},
    {"fault": "reset_mid_chunk"},
    {"fault": "close_mid"},
    {"count_fault": "500"},
    {"count_fault": "bad_json"},
    {"count_fault": "close"},
]


@pytest.fixture(scope="module")
def engine() -> Iterator[int]:
    with process("kvgate.lab.scripted_engine", "--port", "0") as scripted:
        yield int(json.loads(scripted.line())["port"])


def ask(port: int, path: str, body: Any, script: dict[str, Any], **headers: str) -> bytes:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    sent = {"authorization": f"Bearer {KEY}", "x-api-key": KEY, "x-script": json.dumps(script)} | headers
    try:
        client.request("POST", path, body if isinstance(body, bytes) else json.dumps(body), sent)
        return client.getresponse().read()
    except (http.client.HTTPException, ConnectionError):
        return b""
    finally:
        client.close()


def test_neither_keys_nor_prompts_are_written_anywhere(engine: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONASYNCIODEBUG", "1")  # the most that anything below us can say
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5, "stream": True}
    shown = b""
    with process("kvgate", "serve", *sizes(engine)) as child:
        gate = Serving(child)
        for script in FAULTS:
            ask(gate.port, "/v1/chat/completions", chat, script)
            ask(gate.port, "/v1/chat/completions", chat | {"stream": False}, script)
        # What we answer ourselves must not repeat them either.
        for path, body in (
            ("/v1/chat/completions", chat | {"max_tokens": PROMPT}),
            ("/v1/chat/completions", b'{"messages": "' + PROMPT.encode()),
            ("/v1/chat/completions", chat | {"max_tokens": 10**9, "n": 9}),
            ("/v1/audio/speech", {"input": PROMPT}),
            ("/v1/completions", {"prompt": {PROMPT: 1}}),
        ):
            shown += ask(gate.port, path, body, {})
        for raw in (
            f"POST /v1/completions HTTP/1.1\r\nHost: t\r\nAuthorization : {KEY}\r\n\r\n{PROMPT}",
            f"POST /v1/completions HTTP/1.1\r\nHost: t\r\nX-Api-Key: {KEY}\0\r\n\r\n",
            f"POST /v1/completions HTTP/1.1\r\nX-Api-Key: {KEY}\r\nContent-Length: x\r\n\r\n{PROMPT}",
        ):
            with socket.create_connection(("127.0.0.1", gate.port), timeout=PATIENCE) as sock:
                sock.sendall(raw.encode())
                shown += sock.recv(65_536)
        for page in ("/status", "/metrics", "/healthz"):
            client = http.client.HTTPConnection("127.0.0.1", gate.admin, timeout=PATIENCE)
            client.request("GET", page)
            shown += client.getresponse().read()
            client.close()
        os.kill(child.pid, signal.SIGTERM)
        status, out, err = child.end()
    assert status == 0
    assert b"invalid_request" in shown
    written = shown.decode() + out + err
    for secret in (KEY, PROMPT):
        assert secret not in written
