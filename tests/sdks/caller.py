"""One call of one client library, run in that library's own environment: `caller.py KIND URL MODE`.

MODE `count` replaces sleeping by writing down how long it would have been; `real` really sleeps. Prints
one line of JSON: the sleeps, and what the user of the library gets to see.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
SHORTEST = 0.3  # libraries sleep for moments for reasons of their own
sleeps: list[float] = []


def call_openai(url: str) -> str:
    import openai

    client = openai.OpenAI(base_url=url + "/v1", api_key="k")
    return str(client.chat.completions.create(**CHAT).choices[0].message.content)


def call_anthropic(url: str) -> str:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="k")
    return str(client.messages.create(max_tokens=9, **CHAT).content[0].text)


def call_litellm(url: str) -> str:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet at import
    import litellm

    answer = litellm.completion(
        model="openai/m", messages=CHAT["messages"], api_base=url + "/v1", api_key="k", max_retries=2
    )
    return str(answer.choices[0].message.content)


def call_urllib3(url: str) -> str:
    import urllib3

    # POST is not in its default methods, and neither is raising what it was told a choice of ours.
    retry = urllib3.Retry(total=2, status_forcelist=[429, 503], allowed_methods=None, raise_on_status=False)
    pool = urllib3.PoolManager(retries=retry)
    answer = pool.request("POST", url + "/v1/chat/completions", json=CHAT)
    return shown(answer.status, answer.data)


def call_httpx_retries(url: str) -> str:
    import httpx
    from httpx_retries import Retry, RetryTransport

    retry = Retry(total=2, allowed_methods=["POST"])
    with httpx.Client(transport=RetryTransport(retry=retry)) as client:
        answer = client.post(url + "/v1/chat/completions", json=CHAT)
        return shown(answer.status_code, answer.content)


def shown(status: int, body: bytes) -> str:
    if status != 200:
        raise RuntimeError(f"{status}: {body.decode()}")
    return str(json.loads(body)["choices"][0]["message"]["content"])


CALLS: dict[str, Callable[[str], str]] = {
    "openai": call_openai,
    "anthropic": call_anthropic,
    "litellm": call_litellm,
    "urllib3": call_urllib3,
    "httpx-retries": call_httpx_retries,
}


def note_sleeps() -> None:
    real, areal = time.sleep, asyncio.sleep

    def sleep(seconds: float) -> None:
        if seconds < SHORTEST:
            real(seconds)
        else:
            sleeps.append(seconds)

    async def asleep(seconds: float, *rest: Any) -> Any:
        if seconds >= SHORTEST:
            sleeps.append(seconds)
            seconds = 0
        return await areal(seconds, *rest)

    time.sleep, asyncio.sleep = sleep, asleep  # type: ignore[assignment]


def main() -> None:
    kind, url, mode = sys.argv[1:]
    if mode == "count":
        note_sleeps()
    result: dict[str, Any] = {"text": None, "error": None}
    try:
        result["text"] = CALLS[kind](url)
    except Exception as error:  # the user sees its text, whatever its class
        result["error"] = f"{type(error).__name__}: {error}"
    print(json.dumps({**result, "sleeps": sleeps}))


if __name__ == "__main__":
    main()
