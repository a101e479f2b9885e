"""`kvgate explain` against an admin server with a gateway that answers what the test says."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvgate.cli import main
from kvgate.edge.admin import AdminServer

ADMIT = {
    "decision": "admit",
    "reason": None,
    "prompt_tokens": 71,
    "sequences": 1,
    "output_cap": 1977,
    "output_cap_was_set": False,
    "needed_blocks": 2047,
    "needed_tokens": 2047,
    "free_tokens": 2048,
    "usable_tokens": 2048,
    "output_cap_that_fits": 1977,
    "context": 2048,
    "block_size": 1,
    "message": "It would be admitted now.",
}
REFUSE = ADMIT | {
    "decision": "refuse",
    "reason": "kv_capacity",
    "output_cap": 600,
    "output_cap_was_set": True,
    "needed_blocks": 670,
    "needed_tokens": 670,
    "free_tokens": 100,
    "output_cap_that_fits": 30,
    "message": "Busy: 670 tokens needed, 100 free.",
}


class FakeGateway:
    ready = True

    def __init__(self, answer: dict[str, Any]) -> None:
        self.observers: list[Callable[[Any], None]] = []
        self.answer = answer
        self.asked: list[tuple[str, bytes]] = []

    def snapshot(self) -> dict[str, Any]:
        return {}

    async def explain(self, path: str, body: bytes) -> dict[str, Any]:
        self.asked.append((path, body))
        return self.answer


def explain(answer: dict[str, Any], body: dict[str, Any], *options: str) -> tuple[Result, FakeGateway]:
    gateway = FakeGateway(answer)

    async def run() -> Result:
        admin = AdminServer(gateway, "127.0.0.1", 0)
        await admin.start()
        try:
            arguments = ["explain", "-", "--admin", f"127.0.0.1:{admin.port}", *options]
            return await asyncio.to_thread(CliRunner().invoke, main, arguments, input=json.dumps(body))
        finally:
            await admin.stop()

    return asyncio.run(run()), gateway


def rows(output: str) -> dict[str, str]:
    """The table by its first column; columns are two spaces or more apart."""
    names = (
        *("Prompt tokens", "Output cap asked", "Output cap enforced", "Sequences", "Blocks needed"),
        *("Tokens needed", "Tokens free now", "Cap that would fit"),
    )
    found = {}
    for line in output.splitlines():
        for name in names:
            if line.startswith(name + " "):
                found[name] = " ".join(line.removeprefix(name).split())
    return found


def test_an_unset_cap_is_explained_as_the_rest_of_the_context() -> None:
    result, gateway = explain(ADMIT, {"messages": []})
    assert result.exit_code == 0
    assert rows(result.output) == {
        "Prompt tokens": "71 of a context of 2,048",
        "Output cap asked": "- unset",
        "Output cap enforced": "1,977 unset: the rest of the context, 2,048 - 71",
        "Sequences": "1",
        "Blocks needed": "2,047 of 1 token",
        "Tokens needed": "2,047",
        "Tokens free now": "2,048 of 2,048 usable",
        "Cap that would fit": "1,977 now",
    }
    assert "Would be admitted now." in result.output
    assert gateway.asked == [("/v1/chat/completions", b'{"messages": []}')]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_refusal_shows_the_cap_asked_and_the_cap_that_would_fit(field: str) -> None:
    result, gateway = explain(REFUSE, {"prompt": "x", field: 900}, "--path", "/v1/completions")
    shown = rows(result.output)
    assert result.exit_code == 0
    assert shown["Output cap asked"] == "900"
    assert shown["Output cap enforced"].startswith("600 lowered to the gateway's limit")
    assert shown["Cap that would fit"] == "30 now"
    assert "Would be refused now: kv_capacity." in result.output
    assert "Busy: 670 tokens needed, 100 free." in result.output
    assert gateway.asked[0][0] == "/v1/completions"


@pytest.mark.parametrize(
    ("change", "asked", "why"),
    [
        ({"output_cap": 600}, 600, "600 as asked"),
        ({"output_cap": 1977}, 5000, "1,977 lowered to the rest of the context, 2,048 - 71"),
        ({"output_cap": 16, "output_cap_was_set": False}, None, "16 unset: the default or limit"),
        ({"output_cap": None, "prompt_tokens": 2048}, 5, "- none: the prompt leaves no room"),
    ],
)
def test_the_enforced_cap_has_its_reason(change: dict[str, Any], asked: int | None, why: str) -> None:
    result, _ = explain(REFUSE | change, {"max_tokens": asked})
    assert rows(result.output)["Output cap enforced"].startswith(why)


def test_a_cap_for_what_never_fits_is_meant_for_an_empty_pool() -> None:
    result, _ = explain(REFUSE | {"reason": "kv_capacity_exceeded"}, {})
    assert rows(result.output)["Cap that would fit"] == "30 in an empty pool"


def test_what_cannot_be_priced_shows_only_the_reason() -> None:
    answer = {"decision": "refuse", "reason": "invalid_request", "message": "The body is [not] JSON."}
    result, _ = explain(answer, {})
    assert result.exit_code == 0
    assert result.output == "Would be refused now: invalid_request.\nThe body is [not] JSON.\n"


def test_json_is_the_answer_of_the_gateway_unchanged() -> None:
    result, _ = explain(REFUSE, {}, "--json")
    assert json.loads(result.output) == REFUSE


def test_without_a_gateway_the_message_says_what_to_do_and_the_status_is_2(tmp_path: Path) -> None:
    request = tmp_path / "request.json"
    request.write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    result = CliRunner().invoke(main, ["explain", str(request), "--admin", f"http://127.0.0.1:{port}"])
    assert result.exit_code == 2
    assert f"no gateway answers at http://127.0.0.1:{port}" in result.output
    assert "kvgate serve" in result.output


def test_another_server_is_not_taken_for_the_admin_server() -> None:
    result, _ = explain({"hello": "world"}, {})
    assert result.exit_code == 2
    assert "is not kvgate's admin server" in result.output
