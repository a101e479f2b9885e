"""A client's chat, brought into the form in which vLLM hands it to the chat template.

Promises: what the template then sees is what it sees in the engine: text parts joined or wrapped,
tool arguments decoded, tools with the fields that the engine keeps. The client's own objects are not
changed. Kept in step with vLLM's chat rendering (0.32).
"""

from __future__ import annotations

import json
from collections import Counter as Tally
from dataclasses import dataclass, field
from typing import Any

from kvgate.tokens.records import CannotCount

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
IMAGE_PARTS = ("image_url", "input_image", "image")
AUDIO_PARTS = ("input_audio", "audio_url")
# A part without a type, or with an id of its own, is to the engine what the first of these says.
_MEDIA_FIELDS = (
    *("image_url", "image_pil", "image_embeds", "audio_embeds", "video_embeds", "prompt_embeds"),
    *("audio_url", "input_audio", "video_url"),
)
# Their text reaches the template as it is.
_PLAIN_ROLES = ("user", "assistant")
# vLLM drops this line of one client's system prompt; it changes with every request.
_BILLING_LINE = "x-anthropic-billing-header"
_KNOWN_PART_FIELDS = frozenset(
    (
        *("type", "text", "refusal", "thinking", "closed", "uuid", "name", "data", "file"),
        *("prompt_cache_breakpoint", *_MEDIA_FIELDS),
    )
) - {"prompt_embeds"}


@dataclass(slots=True)
class Chat:
    """Messages for the template, and the images and recordings that they hold, in order."""

    messages: list[dict[str, Any]]
    images: list[Any] = field(default_factory=list)
    audio: list[Any] = field(default_factory=list)
    has_developer: bool = False


def template_messages(messages: list[Any], wrap_parts: bool, audio_written: str | None = None) -> Chat:
    """The messages as the template sees them. `wrap_parts`: the template loops over content parts.

    `audio_written`: what the engine writes for a recording where the template takes only text; `{}` in
    it is the recording's number. None: not known. Raises `CannotCount` for parts whose tokens the text
    does not show (video, files).
    """
    chat = Chat([])
    seen = chat.messages
    for message in messages:
        content = message.get("content")
        if type(content) is str and len(message) == 2 and message["role"] in _PLAIN_ROLES:
            # Most are so; a template cannot change them.
            if wrap_parts:
                message = {"role": message["role"], "content": [{"type": "text", "text": content}]}
            elif next(iter(message)) != "role":
                message = {"role": message["role"], "content": content}  # it may be written out whole
            seen.append(message)
        else:
            made = _message(message, wrap_parts, chat, audio_written)
            chat.has_developer = chat.has_developer or made["role"] == "developer"
            seen.append(made)
    return chat


def _message(
    message: dict[str, Any], wrap_parts: bool, chat: Chat, audio_written: str | None
) -> dict[str, Any]:
    role, content = message["role"], message.get("content")
    if type(content) is str and not wrap_parts:
        seen: Any = _without_billing(content) or "" if role == "system" else content
    else:
        seen = _content(role, content, wrap_parts, chat, audio_written)
    made: dict[str, Any] = {"role": role, "content": seen}
    if role == "assistant":
        if message.get("tool_calls"):
            made["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
        reasoning = next(
            (message[k] for k in ("reasoning", "reasoning_content") if message.get(k) is not None), None
        )
        if reasoning is not None:
            made.update(reasoning=reasoning, reasoning_content=reasoning, thinking=reasoning)
    elif role == "tool" and "tool_call_id" in message:
        made["tool_call_id"] = message["tool_call_id"]
    elif role == "developer":
        made["tools"] = message.get("tools")
    if isinstance(message.get("name"), str):
        made["name"] = message["name"]
    return made


def _content(role: str, content: Any, wrap_parts: bool, chat: Chat, audio_written: str | None) -> Any:
    parts = [] if content is None else [content] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise CannotCount("a message's 'content' must be a string or a list of parts")
    made: list[dict[str, Any]] = []
    written: list[str] = []
    for part in parts:
        text = _text(part)
        if text is None:
            kind = _kind(part)
            if kind in IMAGE_PARTS:
                chat.images.append(part)
                made.append({"type": "image"})
            elif kind in AUDIO_PARTS:
                chat.audio.append(part)
                made.append({"type": "audio", **_extras(part)})
                written.append(_written(audio_written, len(chat.audio), wrap_parts, kind))
            continue
        if role == "system":
            kept = _without_billing(text)
            if kept is None:
                continue
            text = kept
        made.append({"type": "text", "text": text, **_extras(part)})
    only_text = all(part["type"] == "text" for part in made)
    if wrap_parts and not (role == "tool" and only_text):
        return made
    joined = "\n".join(part["text"] for part in made if part["type"] == "text")
    if not written:
        return joined
    # What the client has written out itself is not put before the text again.
    missing = [mark for mark, times in Tally(written).items() for _ in range(times - joined.count(mark))]
    return "\n".join([*missing, joined] if joined else missing)


def _written(audio_written: str | None, number: int, wrap_parts: bool, kind: str) -> str:
    if wrap_parts:
        return ""
    if audio_written is None:
        raise CannotCount(f"tokens of a content part of type {kind!r} are not known for this model")
    return audio_written.format(number)


def _kind(part: dict[str, Any]) -> Any:
    """What the engine takes a part for."""
    kind = part.get("type")
    if kind is None or part.get("uuid") is not None:
        return next((name for name in _MEDIA_FIELDS if name in part), kind)
    return kind


def _text(part: Any) -> str | None:
    """The text of a part; None for an image, a recording, or a part that the engine skips."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise CannotCount("a content part must be an object")
    kind = _kind(part)
    text = part.get("thinking" if kind == "thinking" else TEXT_PARTS.get(kind, "")) if kind else None
    if isinstance(text, str):
        return text
    if kind in TEXT_PARTS or kind in IMAGE_PARTS or kind in AUDIO_PARTS:
        return None
    raise CannotCount(f"tokens of a content part of type {kind!r} are not known here")


def _extras(part: Any) -> dict[str, Any]:
    if not isinstance(part, dict) or len(part) <= 2:
        return {}
    return {name: value for name, value in part.items() if name not in _KNOWN_PART_FIELDS}


def _without_billing(text: str) -> str | None:
    if not text.startswith(_BILLING_LINE):
        return text
    return text.partition("\n")[2] or None


def _tool_call(call: Any) -> Any:
    """The call with its arguments as an object: templates are written for that form."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise CannotCount("'tool_calls' must hold objects with a 'function'")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}


def template_tools(fields: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The tools as the engine shows them to the template: known fields only, in its order."""
    tools = fields.get("tools")
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise CannotCount("'tools' must be a list")
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        raise CannotCount("a tool must be an object with a 'function'")
    deferred = tool.get("defer_loading")
    seen: dict[str, Any] = {
        "name": function.get("name"),
        "description": function.get("description"),
        "parameters": function.get("parameters"),
    }
    if function.get("strict") is not None:
        seen["strict"] = function["strict"]
    own = function.get("defer_loading")
    if own is not None or deferred is not None:
        seen["defer_loading"] = deferred if own is None else own
    made: dict[str, Any] = {"type": "function", "function": seen}
    if deferred is not None:
        made["defer_loading"] = deferred
    return made


def developer_as_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates that do not know the role `developer`: one system message, at the front."""
    texts: list[str] = []
    rest: list[dict[str, Any]] = []
    moved = False
    changed: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if message["role"] not in ("developer", "system"):
            rest.append(message)
            changed.append(message)
            continue
        moved = moved or index > 0
        kept = {name: value for name, value in message.items() if name != "tools"}
        changed.append({**kept, "role": "system"})
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "\n".join(part.get("text", "") for part in content if "text" in part)
        if content:
            texts.append(content)
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest] if moved else changed
