"""The OpenAI SDK through the gateway: nothing to change but the base URL.

The SDK retries a 429 by itself and obeys kvgate's Retry-After (its default is two retries). Here
that is switched off, to show what a refusal carries and what a client can do with it.

    kvgate serve &
    pip install openai
    python examples/openai_sdk.py --base-url http://127.0.0.1:8080/v1
"""

from __future__ import annotations

import argparse
import time

from openai import APIStatusError, OpenAI, RateLimitError


def ask(client: OpenAI, model: str, question: str, max_tokens: int, patience: float) -> str:
    """The whole answer. Comes back when it was told to, for up to `patience` seconds."""
    give_up = time.monotonic() + patience
    while True:
        try:
            stream = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": question}],
                max_tokens=max_tokens,
                stream=True,
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        except RateLimitError as busy:
            # Refused before any work was done, so asking again costs nothing and repeats nothing.
            milliseconds = busy.response.headers.get("retry-after-ms")
            pause = float(milliseconds) / 1000 if milliseconds else 1.0
            facts = busy.body if isinstance(busy.body, dict) else {}
            print(f"busy ({busy.code}): told to come back in {pause:.1f} s", flush=True)
            fits = facts.get("output_cap_that_fits")
            if fits:
                print(f"  or ask for {fits} tokens or less, which would be admitted now", flush=True)
            if time.monotonic() + pause > give_up:
                raise
            time.sleep(pause)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8080/v1")
    parser.add_argument("--model", default="default")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--patience", type=float, default=120.0, help="seconds to keep coming back")
    options = parser.parse_args()

    with OpenAI(base_url=options.base_url, api_key="not-needed", max_retries=0) as client:
        answer = ask(client, options.model, "Why is the sky blue?", options.max_tokens, options.patience)
        print(f"answer: {answer}", flush=True)
        try:
            ask(client, options.model, "word " * 100_000, options.max_tokens, options.patience)
        except APIStatusError as never:
            # 413: no retry can help, and the SDK makes none. The message says what would.
            print(f"refused for good ({never.status_code} {never.code}): {never.message}", flush=True)


if __name__ == "__main__":
    main()
