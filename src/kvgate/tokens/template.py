"""A chat template: from a request's fields to the text that the engine tokenizes.

Promises: the text that vLLM makes (through transformers' `apply_chat_template`) from the same chat
completion. What a template refuses is raised as `TemplateRefused` with the template's own words. It
knows no tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, meta, nodes

from kvgate.tokens.content_format import wants_parts
from kvgate.tokens.messages import developer_as_system, template_messages, template_tools
from kvgate.tokens.records import BadTokenizer, CannotCount, TemplateRefused
from kvgate.tokens.sandbox import ChatEnvironment, ChatProgram, chat_environment

# Written behind the final message to find where it ends in the rendered text.
_END_MARK = "KVGATE_END_OF_FINAL_MESSAGE "
# `chat_template_kwargs` that the engine takes for itself, whatever the template reads.
_ENGINE_FIELDS = ("add_generation_prompt", "continue_final_message", "documents")
_NOT_FOR_TEMPLATES = frozenset(("chat_template", "tokenize", "messages", "tools", *_ENGINE_FIELDS))


@dataclass(slots=True)
class Rendered:
    """The prompt's text, and what it was made from (for the breakdown by part)."""

    text: str
    # The text in the pieces in which the template wrote it: most begin or end with a message.
    pieces: list[str]
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    images: list[Any]
    audio: list[Any] = field(default_factory=list)
    # Whether the template itself writes what stands for an image.
    writes_images: bool = True


class ChatTemplate:
    """One compiled template, or several by name (`default`, `tool_use`)."""

    def __init__(
        self,
        source: str | dict[str, str],
        special_tokens: dict[str, str],
        now: Callable[[], datetime],
        parts: bool | None = None,
        audio_written: str | None = None,
    ) -> None:
        """`parts` overrides the detection of the content format. Raises `BadTokenizer`.

        `audio_written`: see `messages.template_messages`.
        """
        sources = {"default": source} if isinstance(source, str) else source
        self._specials = special_tokens
        self._audio_written = audio_written
        environment = chat_environment(now)
        try:
            self._named = {name: _Compiled(environment, text, parts) for name, text in sources.items()}
        except TemplateError as error:
            raise BadTokenizer(f"the chat template does not compile: {error}") from None

    @property
    def literals(self) -> str:
        """All text that the templates write themselves."""
        return "\0".join(one.literals for one in self._named.values())

    def render(self, fields: dict[str, Any]) -> Rendered:
        """The prompt of a chat completion's body. Raises `CannotCount` or `TemplateRefused`."""
        tools = template_tools(fields)
        one = self._pick(fields, tools)
        try:
            chat = template_messages(fields["messages"], one.wants_parts, self._audio_written)
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CannotCount(f"'messages' has an unexpected form: {error!r}") from None
        messages = chat.messages
        if chat.has_developer and not one.knows_developer:
            messages = developer_as_system(messages)
        values = {**self._specials, **self._switches(fields, one)}
        proceed = bool(fields.get("continue_final_message"))
        if proceed:
            if values.get("add_generation_prompt"):
                raise TemplateRefused(
                    "'continue_final_message' and 'add_generation_prompt' cannot both be true"
                )
            messages = _marked(messages)
        try:
            text, pieces = one.write({**values, "messages": messages, "tools": tools})
        except TemplateError as error:
            raise TemplateRefused(str(error)) from None
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
            raise TemplateRefused(f"the chat template fails on this chat: {error}") from None
        if proceed:
            text = _cut(text, _final_text(chat.messages[-1].get("content")))
            pieces = [text]
        return Rendered(text, pieces, messages, tools, chat.images, chat.audio, one.wants_parts)

    def _pick(self, fields: dict[str, Any], tools: list[dict[str, Any]] | None) -> _Compiled:
        if fields.get("chat_template"):
            raise CannotCount("the request brings its own 'chat_template'")
        if tools is not None and "tool_use" in self._named:
            return self._named["tool_use"]
        if "default" not in self._named:
            raise CannotCount(f"the tokenizer has no default chat template, only {sorted(self._named)}")
        return self._named["default"]

    def _switches(self, fields: dict[str, Any], one: _Compiled) -> dict[str, Any]:
        """What the template may read besides messages and tools."""
        asked = fields.get("chat_template_kwargs") or {}
        if not isinstance(asked, dict):
            raise CannotCount("'chat_template_kwargs' must be an object")
        if "chat_template" in asked or "tokenize" in asked:
            raise CannotCount("'chat_template_kwargs' may not hold 'chat_template' or 'tokenize'")
        values = {k: v for k, v in asked.items() if k in one.variables and k not in _NOT_FOR_TEMPLATES}
        effort = fields.get("reasoning_effort")
        if effort is not None:
            if "reasoning_effort" in one.variables:
                values["reasoning_effort"] = effort
            if "enable_thinking" in one.variables and "enable_thinking" not in asked:
                values["enable_thinking"] = effort != "none"
        # The request's own fields win over the same names in `chat_template_kwargs`, and these two
        # have a value even when they are not sent.
        generate = fields.get("add_generation_prompt")
        values["add_generation_prompt"] = True if generate is None else generate
        values["documents"] = fields.get("documents") or asked.get("documents")
        return values


class _Compiled:
    """A template and what its syntax tree tells about it."""

    def __init__(self, environment: ChatEnvironment, source: str, parts: bool | None) -> None:
        tree = environment.parse(source)
        self.write = ChatProgram(environment, source).write
        self.variables = frozenset(meta.find_undeclared_variables(tree))
        self.wants_parts = wants_parts(tree) if parts is None else parts
        self.knows_developer = '"developer"' in source or "'developer'" in source
        texts = [node.data for node in tree.find_all(nodes.TemplateData)]
        texts += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        self.literals = "\0".join(texts)


def _marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    content = messages[-1].get("content")
    if isinstance(content, list):
        for index in range(len(content) - 1, -1, -1):
            if "text" in content[index]:
                part = {**content[index], "text": content[index]["text"] + _END_MARK}
                content = [*content[:index], part, *content[index + 1 :]]
                return [*messages[:-1], {**messages[-1], "content": content}]
    if not isinstance(content, str):
        raise TemplateRefused("'continue_final_message' needs a final message with text")
    return [*messages[:-1], {**messages[-1], "content": content + _END_MARK}]


def _final_text(content: Any) -> str:
    """The text that is to be continued; there is one, or `_marked` has refused."""
    return content if isinstance(content, str) else next(p["text"] for p in reversed(content) if "text" in p)


def _cut(text: str, final: str) -> str:
    """The text up to the end of the final message, as it was before the template went on."""
    at = text.rfind(_END_MARK.strip())
    # A template may write only a part of it, as those do that take out what was thought aloud.
    if at < 0 or final.strip() not in text:
        raise TemplateRefused("'continue_final_message': the template leaves the final message out")
    # A template that strips the message strips the mark's own space, and would have stripped the
    # message's.
    return text[:at] if text.startswith(_END_MARK, at) else text[:at].rstrip()
