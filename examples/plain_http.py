"""No SDK, only the standard library: what goes over the wire, and how to come back when told to.

python examples/plain_http.py --url http://127.0.0.1:8080
"""

from __future__ import annotations

import argparse
import http.client
import json
import time
from urllib.parse import urlsplit

BODY = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    url = urlsplit(parser.parse_args().url)
    for _ in range(30):
        connection = http.client.HTTPConnection(url.hostname or "127.0.0.1", url.port, timeout=600)
        try:
            connection.request(
                "POST", "/v1/chat/completions", json.dumps(BODY), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            body = json.loads(answer.read())
        finally:
            connection.close()
        print(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower().startswith(("x-kvgate-", "retry-after")):
                print(f"{name}: {value}")
        if answer.status != 429:
            print(json.dumps(body, indent=2, ensure_ascii=False))
            return
        print(body["error"]["message"], flush=True)
        time.sleep(int(answer.headers["retry-after"]))
    raise SystemExit("the engine was busy for too long")


if __name__ == "__main__":
    main()
