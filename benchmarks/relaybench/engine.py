"""The engine of the benchmark: as cheap as Python allows, so that the gateway is what is measured.

    python engine.py --port 0        prints the port

A POST is answered with one fixed body, or, where its body says `"stream": true`, with `max_tokens`
events: the first at once, the others 20 ms apart, each stream in a phase of its own (timers have a
resolution of 1 ms). Counting calls and the pages that routers look at are answered too. It parses
no more than it needs and must not be used as an example of HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from typing import Any, cast

import uvloop

INTERVAL = 0.020  # seconds between two events of a stream
PROMPT_TOKENS = 400  # what counting calls answer
PROMPT_IDS = 320  # at most what a body of the client holds
MODEL = "bench"
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.I)
CAP = re.compile(rb'"max_tokens": ?(\d+)')
STREAM = re.compile(rb'"stream": ?true')
WANTS_USAGE = re.compile(rb'"include_usage": ?true')
# Events differ: some gateways take a stream that says the same again and again for a broken model.
WORDS = 256
GOLDEN = 0.6180339887  # multiples of it, without their whole part, spread evenly


def page(value: Any) -> bytes:
    body = json.dumps(value).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def completion(kind: str, choice: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "id": "cmpl-0",
        "object": kind,
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, **choice}],
        **more,
    }


def event(value: Any) -> bytes:
    return chunk(b"data: " + json.dumps(value).encode() + b"\n\n")


class Answers:
    """Every byte that can be sent for one of the two generating endpoints."""

    def __init__(self, *, is_chat: bool, prompt_tokens: int) -> None:
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 16, "total_tokens": prompt_tokens + 16}
        kind, text = "chat.completion" if is_chat else "text_completion", "word " * 16
        whole: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        )
        self.whole = page(completion(kind, {**whole, "finish_reason": "stop"}, usage=usage))
        kind += ".chunk" if is_chat else ""
        self.events = []
        for number in range(WORDS):
            word = f"w{number:03} "
            part: dict[str, Any] = {"delta": {"content": word}} if is_chat else {"text": word}
            self.events.append(event(completion(kind, {**part, "finish_reason": None})))
        last: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
        self.stop = event(completion(kind, {**last, "finish_reason": "stop"}))
        self.usage = event(completion(kind, {}) | {"choices": [], "usage": usage})
        self.done = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        self.head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )


CHAT = Answers(is_chat=True, prompt_tokens=PROMPT_TOKENS)
TEXT = Answers(is_chat=False, prompt_tokens=PROMPT_IDS)
COUNTED = page({"input_tokens": PROMPT_TOKENS})
TOKENIZED = page({"count": PROMPT_TOKENS, "max_model_len": 8192, "tokens": list(range(PROMPT_TOKENS))})
MODELS = page({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "bench"}]})
OTHER = page({"status": "ok", "model_path": MODEL, "is_generation": True})


class Connection(asyncio.Protocol):
    transport: asyncio.Transport
    streams = 0

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.buffer = b""
        self.timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            found = LENGTH.search(self.buffer, 0, end)
            size = end + 4 + (int(found[1]) if found else 0)
            if len(self.buffer) < size:
                return
            request, self.buffer = self.buffer[:size], self.buffer[size:]
            self.answer(request, request[end + 4 :])

    def answer(self, request: bytes, body: bytes) -> None:
        method, path, _ = request.split(b" ", 2)
        if method != b"POST":
            self.transport.write(MODELS if path.startswith(b"/v1/models") else OTHER)
        elif path == b"/v1/chat/completions":
            self.generate(CHAT, body)
        elif path == b"/v1/completions":
            self.generate(TEXT, body)
        elif path == b"/tokenize":
            self.transport.write(TOKENIZED)
        else:
            self.transport.write(COUNTED)

    def generate(self, answers: Answers, body: bytes) -> None:
        if not STREAM.search(body):
            self.transport.write(answers.whole)
            return
        cap = CAP.search(body)
        self.answers, self.left = answers, int(cap[1]) if cap else 16
        self.has_usage = WANTS_USAGE.search(body) is not None
        self.left -= 1
        self.transport.write(answers.head + answers.events[0])
        if self.left <= 0:
            self.end()
            return
        Connection.streams += 1
        self.next_at = self.loop.time() + INTERVAL * (Connection.streams * GOLDEN % 1)
        self.timer = self.loop.call_at(self.next_at, self.step)

    def step(self) -> None:
        self.transport.write(self.answers.events[self.left % WORDS])
        self.left -= 1
        if self.left <= 0:
            self.end()
            return
        self.next_at += INTERVAL
        self.timer = self.loop.call_at(self.next_at, self.step)

    def end(self) -> None:
        self.timer = None
        usage = self.answers.usage if self.has_usage else b""
        self.transport.write(self.answers.stop + usage + self.answers.done)


async def serve(port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(loop), "127.0.0.1", port, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    uvloop.run(serve(parser.parse_args().port))
