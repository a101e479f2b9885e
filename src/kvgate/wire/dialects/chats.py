"""Conversations: messages checked, and the forms of other APIs turned into OpenAI's.

Promise: every text that a body gives to the model stands somewhere in the conversation; what is not
text is counted as media. The turned form serves counting only: the engine gets the body as it came.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvgate.wire.body import BadBody
from kvgate.wire.dialects.fields import kind, objects_of
from kvgate.wire.dialects.shape import Conversation

# Fields besides messages and tools that a chat template, or the engine before it, may read.
TEMPLATE_FIELDS = (
    "add_generation_prompt",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "functions",
    "guideline",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "reasoning_effort",
    "response_format",
    "think",
    "tool_choice",
    "tool_prompt",
)
_TEMPLATE_FIELDS = frozenset(TEMPLATE_FIELDS)
_TEXT_TYPES = frozenset(
    {
        "text",
        "input_text",
        "output_text",
        "refusal",
        "thinking",
        "redacted_thinking",
        "reasoning",
        "summary_text",
    }
)


def messages_of(value: Any, name: str = "messages") -> list[dict[str, Any]]:
    """A list of at least one message with a role. Raises `BadBody`."""
    if not isinstance(value, list) or not value:
        raise BadBody(f"{name!r} must be a list with at least one message", name)
    for index, message in enumerate(value):
        if not isinstance(message, dict):
            raise BadBody(f"'{name}[{index}]' must be an object", name)
        if not isinstance(message.get("role"), str):
            raise BadBody(f"'{name}[{index}].role' must be a string", name)
    return value


def conversation_of(messages: list[dict[str, Any]], fields: Mapping[str, Any]) -> Conversation:
    """The conversation of a body in OpenAI's chat form."""
    options: dict[str, Any] = {}
    if not _TEMPLATE_FIELDS.isdisjoint(fields):  # most bodies have none of them
        options = {name: fields[name] for name in TEMPLATE_FIELDS if fields.get(name) is not None}
    media = 0
    for message in messages:
        content = message.get("content")
        if not isinstance(content, str):
            media += media_in(content)
    return Conversation(messages, objects_of(fields, "tools"), options, media)


def media_in(content: Any) -> int:
    """Parts of a message's content that are not text; unknown kinds count as such."""
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        return 0
    return sum(1 for part in content if not is_text_part(part))


def is_text_part(part: Any) -> bool:
    if isinstance(part, str):
        return True
    if not isinstance(part, dict):
        return False
    named = part.get("type", "text" if "text" in part else "?")
    return isinstance(named, str) and named in _TEXT_TYPES  # it may be anything that JSON has


def from_anthropic(fields: Mapping[str, Any]) -> Conversation:
    """Anthropic's system, blocks and tools in OpenAI's form."""
    messages: list[dict[str, Any]] = []
    media = 0
    if fields.get("system") is not None:
        system = _blocks(fields["system"], "system")
        media += media_in(system)
        messages.append({"role": "system", "content": system})
    for message in messages_of(fields.get("messages")):
        turned = {"role": message["role"], "content": []}
        for block in _blocks(message.get("content"), "messages"):
            match block.get("type"):
                case "tool_use":
                    call = {"name": block.get("name"), "arguments": _written(block.get("input"))}
                    calls = turned.setdefault("tool_calls", [])
                    calls.append({"id": block.get("id"), "type": "function", "function": call})
                case "tool_result":
                    content = block.get("content")
                    media += media_in(content)
                    messages.append(
                        {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
                    )
                case "thinking" | "redacted_thinking":
                    turned["reasoning_content"] = turned.get("reasoning_content", "") + _written(block)
                case _:
                    media += not is_text_part(block)
                    turned["content"].append(block)
        messages.append(turned)
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description"),
                "parameters": tool.get("input_schema", tool),
            },
        }
        for tool in objects_of(fields, "tools")
    ]
    options = {n: fields[n] for n in ("chat_template_kwargs", "thinking", "tool_choice") if n in fields}
    return Conversation(messages, tools, options, media)


def from_responses(fields: Mapping[str, Any]) -> Conversation:
    """Instructions, input items and tools of the responses API in OpenAI's chat form."""
    messages: list[dict[str, Any]] = []
    media = 0
    instructions, given = fields.get("instructions"), fields.get("input")
    if instructions is not None:
        if not isinstance(instructions, str):
            raise BadBody(f"'instructions' must be a string, got {kind(instructions)}", "instructions")
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given or not all(isinstance(item, dict) for item in given):
        raise BadBody("'input' must be a string or a list with at least one item", "input")
    for item in given:
        match item.get("type", "message"):
            case "message":
                media += media_in(item.get("content"))
                messages.append({"role": str(item.get("role", "user")), "content": item.get("content")})
            case "function_call" | "custom_tool_call":
                call = {"name": item.get("name"), "arguments": item.get("arguments", item.get("input"))}
                calls = [{"id": item.get("call_id"), "type": "function", "function": call}]
                messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            case "function_call_output" | "custom_tool_call_output":
                output = item.get("output")
                media += media_in(output)
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
            case _:
                messages.append({"role": "assistant", "content": _written(item)})
    tools = [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in objects_of(fields, "tools")
    ]
    names = ("chat_template_kwargs", "reasoning", "text", "tool_choice")
    return Conversation(messages, tools, {n: fields[n] for n in names if n in fields}, media)


def _blocks(content: Any, name: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise BadBody(f"the content in {name!r} must be a string or a list of blocks", name)
    return content


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
