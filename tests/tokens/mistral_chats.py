"""Chats for Mistral's models: every form that they take, and mixed ones drawn from a seed."""

from __future__ import annotations

from typing import Any

from traffic import requests

SEED = 3
CALL = {
    "id": "chatcmpl-tool-abc123def",
    "type": "function",
    "function": {"name": "f", "arguments": '{"q": "é", "n": 1}'},
}
RESULT = {"role": "tool", "tool_call_id": CALL["id"], "content": "12"}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


CHATS: list[dict[str, Any]] = [
    {"messages": [user("hi"), answer(None, tool_calls=[CALL]), RESULT]},
    {"messages": [user("hi"), answer(None, tool_calls=[CALL]), RESULT, answer("It is 12."), user("and?")]},
    {"messages": [{"role": "developer", "content": "be brief"}, user("hi")]},
    {"messages": [{"role": "system", "content": "be"}, {"role": "system", "content": "brief"}, user("hi")]},
    {"messages": [user("hi"), user("there")]},
    {"messages": [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b </s>"}])]},
    {
        "messages": [user("hi"), answer("Well, ")],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    {"messages": [user("hi"), answer("Well. ")], "add_generation_prompt": False},
    {"messages": [user("hi")], "tools": [{"type": "function", "function": {"name": "f"}}]},
    {"messages": [user("")]},
]


def bodies(how_many: int) -> list[dict[str, Any]]:
    """Mixed chats whose tool calls have ids that Mistral's models take."""
    made = requests(SEED, how_many, ["[INST]", "</s>", "[TOOL_CALLS]"], False)
    for body in made:
        body.pop("chat_template_kwargs", None)
        for message in body["messages"]:
            for call in message.get("tool_calls") or ():
                call["id"] = "abcdefghi"
            if "tool_call_id" in message:
                message["tool_call_id"] = "abcdefghi"
    return made
