"""Chats of Mistral's models, written by mistral-common: these models have no chat template in vLLM.

Promises: the tokens of the prompt that vLLM makes of a chat in its mistral mode, or `CannotCount`.
Needs `kvgate[mistral]`. The library decides what is written where; the texts in between are counted by
the counter that owns this, so they are cached and accelerated like all others. That this comes to the
library's own count is checked when it is loaded; if not, the library counts alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvgate.tokens.messages import template_tools
from kvgate.tokens.records import BadTokenizer, CannotCount, Count, Part

INSTALL = "pip install 'kvgate[mistral]'"
CountText = Callable[[str], int]
# Mistral's models have call ids of nine letters; vLLM keeps the end of longer ones.
_ID_LENGTH = 9
_TEXT_PARTS = ("text", "thinking")
# From this version of a tokenizer on, vLLM hands the effort to the library.
_KNOWS_EFFORT = 15
_NATIVE = re.compile(r".\.model\.v\d+(m\d+)?")
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": '{"a": "é 1"}'}}
_TOOL = {"type": "function", "function": {"name": "f", "description": "Ü", "parameters": {"type": "object"}}}
# Checked when loaded; a version that has no tools refuses the second one both times.
_CHECKS: tuple[dict[str, Any], ...] = (
    {
        "messages": [
            {"role": "system", "content": "Be [INST] brief.\n"},
            {"role": "user", "content": " Straße 東京 "},
            {"role": "assistant", "content": "Oui, "},
            {"role": "user", "content": "1 + 1 = ?"},
        ]
    },
    {
        "messages": [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "abcdefghi", "content": "12\n"},
        ],
        "tools": [_TOOL],
    },
)


def native_file(root: Path) -> Path | None:
    """The tokenizer's file in Mistral's own format; of several the one that mistral-common takes."""
    if (root / "tekken.json").is_file():
        return root / "tekken.json"
    named = [path for path in sorted(root.glob("*.model.v*")) if _NATIVE.search(path.name)]
    return named[-1] if named else None


def prefers_native(root: Path) -> bool:
    """Whether vLLM takes that file although the directory has a tokenizer.json: its own rule."""
    return any(root.glob("consolidated*.safetensors"))


def mistral_chats(path: Path, count: CountText) -> MistralChats | None:
    """Counts chats with the tokenizer at `path`; None without the library. Raises `BadTokenizer`."""
    try:
        from mistral_common.protocol.instruct.request import ChatCompletionRequest
        from mistral_common.protocol.instruct.validator import ValidationMode
        from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
    except ImportError:
        return None
    try:
        tokenizer = MistralTokenizer.from_file(str(path), mode=ValidationMode.test)
    except Exception as error:  # assertions among them
        raise BadTokenizer(f"mistral-common cannot load {path}: {_first_line(error)}") from None
    return MistralChats(tokenizer, ChatCompletionRequest.from_openai, count)


def count_mistral(chats: MistralChats | None, fields: dict[str, Any], with_parts: bool) -> Count:
    """The count of a chat completion's body. Raises `CannotCount`, also without the library (None)."""
    if chats is None:
        raise CannotCount(f"mistral-common writes this model's chats: {INSTALL}")
    try:
        tokens = chats.count(fields)
        return Count(tokens, "tokenizer", True, chats.parts(fields, tokens) if with_parts else ())
    except (UnicodeError, TypeError):
        raise CannotCount("the text holds half of a surrogate pair") from None
    except (LookupError, AttributeError) as error:
        raise CannotCount(f"'messages' has an unexpected form: {error!r}") from None


class MistralChats:
    """mistral-common's rendering of one model, with counted texts."""

    def __init__(self, tokenizer: Any, read: Callable[..., Any], count: CountText) -> None:
        self._tokenizer = tokenizer
        self._read = read
        self._count = count
        version = str(tokenizer.version.value).lstrip("v")
        self._knows_effort = int(version.partition("m")[0]) >= _KNOWS_EFFORT
        alone = [self._try(fields) for fields in _CHECKS]
        instruct = tokenizer.instruct_tokenizer
        instruct.tokenizer.encode = self._encode
        instruct.decode = lambda *_, **__: ""  # it would write the whole prompt out again
        if [self._try(fields) for fields in _CHECKS] != alone:
            del instruct.tokenizer.encode, instruct.decode

    def count(self, fields: dict[str, Any]) -> int:
        """Tokens of a chat completion's body. Raises `CannotCount`."""
        self._refuse(fields)
        messages = [_message(message) for message in fields["messages"]]
        effort = {"reasoning_effort": fields.get("reasoning_effort")} if self._knows_effort else {}
        try:
            chat = self._read(
                messages=messages,
                tools=template_tools(fields),
                continue_final_message=bool(fields.get("continue_final_message")),
                **effort,
            )
            return len(self._tokenizer.encode_chat_completion(chat).tokens)
        except (UnicodeError, MemoryError):
            raise
        except Exception as error:  # a foreign library: it asserts, and has errors of many kinds
            raise CannotCount(f"mistral-common refuses this chat: {_first_line(error)}") from None

    def parts(self, fields: dict[str, Any], tokens: int) -> tuple[Part, ...]:
        """How much of `tokens` each text takes by itself; what is left is `template`."""
        found: list[Part] = []
        if fields.get("tools"):
            without = self._try({**fields, "tools": None})
            found.append(Part("tools", tokens - without if isinstance(without, int) else 0))
        for index, message in enumerate(fields["messages"]):
            name = "system" if message["role"] in ("system", "developer") else f"messages[{index}]"
            found.append(Part(name, sum(map(self._count, _texts(message)))))
        left = tokens - sum(part.tokens for part in found)
        # Some versions leave out what came before the last question.
        return (*found, Part("template", left)) if left >= 0 else (Part("prompt", tokens),)

    def _encode(self, text: str, bos: bool, eos: bool) -> list[int]:
        return [0] * (self._count(text) + bos + eos)

    def _try(self, fields: dict[str, Any]) -> int | str:
        try:
            return self.count(fields)
        except CannotCount as error:
            return str(error)

    @staticmethod
    def _refuse(fields: dict[str, Any]) -> None:
        """What vLLM refuses in this mode before the library sees it."""
        for name in ("chat_template", "chat_template_kwargs"):
            if fields.get(name) is not None:
                raise CannotCount(f"{name!r} is refused for Mistral's models")
        proceed, generate = fields.get("continue_final_message"), fields.get("add_generation_prompt")
        if not all(value is None or isinstance(value, bool) for value in (proceed, generate)):
            raise CannotCount("'continue_final_message' and 'add_generation_prompt' must be true or false")
        answers = fields["messages"][-1].get("role") == "assistant"
        if proceed and generate is not False:
            raise CannotCount("'continue_final_message' and 'add_generation_prompt' cannot both be true")
        if proceed and not answers:
            raise CannotCount("'continue_final_message' needs a final message of the assistant")
        if answers and generate is not False:
            raise CannotCount("the final message is the assistant's: set 'continue_final_message'")


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """The message as vLLM hands it to the library. Nothing is fetched here: media are refused."""
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in _TEXT_PARTS:
                raise CannotCount(f"tokens of a content part of type {kind!r} are not counted here")
    if message["role"] == "assistant":
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise CannotCount("'tool_calls' must be a list of objects")
        return {**message, "tool_calls": [{**call, "id": _short(call.get("id"))} for call in calls]}
    if "tool_call_id" in message:
        return {**message, "tool_call_id": _short(message["tool_call_id"])}
    return message


def _short(name: Any) -> str:
    if not isinstance(name, str):
        raise CannotCount("a tool call needs an id, and its result a 'tool_call_id'")
    return name[-_ID_LENGTH:]


def _texts(message: dict[str, Any]) -> list[str]:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") for part in parts]
    texts += [
        json.dumps(call.get("function"), ensure_ascii=False) for call in message.get("tool_calls") or ()
    ]
    return [text for text in texts if isinstance(text, str)]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
