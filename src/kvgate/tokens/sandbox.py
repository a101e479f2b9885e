"""The Jinja environment in which chat templates run.

Promises: a template renders to the same text as in Hugging Face transformers and vLLM, cannot reach
Python objects behind the chat's data, and cannot make more text or more loop turns than the bounds
here. It may not read files or the clock; the moment for `strftime_now` is handed in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from itertools import islice, repeat
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvgate.tokens.codegen import PLAIN_STR_METHODS, ChatCodeGenerator
from kvgate.tokens.expressions import DICT_METHODS
from kvgate.tokens.namespaces import ChatNamespace

# Longer than any prompt that a context of ten million tokens holds.
TEXT_MAX = 64 << 20
RANGE_MAX = 100_000
# Turns of all loops, and calls, in one rendering: half a second of work, and more than a chat needs
# that fits a context.
STEPS_MAX = 500_000
# Pieces of output that are joined before their length is looked at again.
PIECES = 64

_PADDING_STR_METHODS = frozenset(("ljust", "rjust", "center", "zfill", "expandtabs"))
_BUILTIN = type("".strip)


class _Generation(Extension):
    """`{% generation %}` marks an assistant's turn for training; what stands inside is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own way to say it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Macro) -> str:
        return str(caller())


class ChatContext(Context):
    """The variables of one rendering, and what it has spent."""

    steps = 0

    @classmethod
    def of(cls, template: Template, outer: dict[str, Any], values: dict[str, Any]) -> ChatContext:
        """What `Template.new_context` does, in less time; `outer` are the globals as a plain dict."""
        made = cls.__new__(cls)
        made.parent = outer | values
        made.vars, made.exported_vars = {}, set()
        made.environment = template.environment
        made.eval_ctx = EvalContext(template.environment, template.name)
        made.name = template.name
        made.globals_keys = set(outer)
        made.blocks = {name: [block] for name, block in template.blocks.items()}
        return made

    def spend(self, steps: int) -> None:
        self.steps += steps
        if self.steps > STEPS_MAX:
            raise SecurityError(f"the chat template takes more than {STEPS_MAX} steps for this chat")


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with short ways for what chat templates do thousands of times, and with bounds."""

    code_generator_class = ChatCodeGenerator
    context_class = ChatContext
    intercepted_binops = frozenset(("*", "**", "%"))

    def getattr(self, obj: Any, attribute: str) -> Any:
        # Plain data first: Jinja would look for a Python attribute, fail, and then ask the dict.
        kind = type(obj)
        if kind is dict:
            if attribute not in DICT_METHODS and attribute[:1] != "_":
                return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        elif kind is str and attribute in PLAIN_STR_METHODS:
            return getattr(obj, attribute)
        elif kind is ChatNamespace:
            return obj.held[attribute] if attribute in obj.held else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(obj) is dict and type(argument) is str and argument in obj:
            return obj[argument]
        if type(obj) is list and type(argument) is int and -len(obj) <= argument < len(obj):
            return obj[argument]
        if type(obj) is ChatNamespace:
            found = isinstance(argument, str) and argument in obj.held
            return obj.held[argument] if found else self.undefined(obj=obj, name=argument)
        return super().getitem(obj, argument)

    def turns(self, context: ChatContext, over: Any) -> Any:
        """What a loop of the template goes over; its turns are counted before it begins, or as it goes."""
        try:
            length = len(over)
        except TypeError:
            return self._counted_turns(context, over)
        context.spend(length)
        return over

    def numbered(self, context: ChatContext, over: Any) -> Iterable[tuple[Any, Any]]:
        """The same with the number of each turn, or with Jinja's `loop` where it is not a list."""
        items = self.turns(context, over)
        if type(items) is list:
            return zip(items, range(len(items)), strict=True)
        return LoopContext(items, self.undefined)

    def numbered_with_items(self, context: ChatContext, over: Any) -> Iterable[tuple[Any, Any, Any]]:
        """The same with the list at each turn."""
        items = self.turns(context, over)
        if type(items) is list:
            return zip(items, range(len(items)), repeat(items))
        return ((item, loop, loop) for item, loop in LoopContext(items, self.undefined))

    def _counted_turns(self, context: ChatContext, over: Any) -> Iterator[Any]:
        for item in over:
            context.spend(1)
            yield item

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """All output of a template, or of one of its blocks."""
        if type(pieces) is list:
            _bounded(sum(map(len, pieces)))
            return "".join(pieces)
        rest, joined, length = iter(pieces), [], 0
        while taken := list(islice(rest, PIECES)):
            text = "".join(taken)
            length += len(text)
            _bounded(length)
            joined.append(text)
        return "".join(joined)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        context.spend(1)
        if obj is ChatNamespace or type(obj) is Macro:
            # Jinja looks through both for marks that they do not have.
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return obj(*args, **kwargs) if obj is ChatNamespace else obj(context.eval_ctx, *args, **kwargs)
        if type(obj) is LoopContext:
            # A recursive loop goes over something of its own.
            args = tuple(self.turns(context, over) for over in args)
            kwargs = {name: self.turns(context, over) for name, over in kwargs.items()}
        text = getattr(obj, "__self__", None) if type(obj) is _BUILTIN else None
        if type(text) is str:
            name = obj.__name__
            if name in PLAIN_STR_METHODS:
                # Jinja passes the loop's variables along, for functions that ask for the context.
                kwargs.pop("_loop_vars", None)
                kwargs.pop("_block_vars", None)
                return obj(*args, **kwargs)
            if name in _PADDING_STR_METHODS:
                _bounded(max([len(text), *(len(text) * a for a in args if isinstance(a, int))]))
            elif name == "replace":
                _bounded(_replaced(text, args))
            elif name == "join":
                return _joined(text, *args)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("a chat template has no use for powers")
        if operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(text, str | list | tuple) and isinstance(times, int):
                    _bounded(len(text) * max(0, times))
        if operator == "%" and isinstance(left, str):
            # `"%99999999s" % x` makes text out of a number; templates that format do so with words.
            _bounded(sum(int(run) for run in _digit_runs(left)))
        return super().call_binop(context, operator, left, right)


def _digit_runs(text: str) -> Iterator[str]:
    return (run[:12] for run in "".join(c if c.isascii() and c.isdigit() else " " for c in text).split())


def _replaced(text: str, args: tuple[Any, ...]) -> int:
    if len(args) < 2 or not all(isinstance(arg, str) for arg in args[:2]):
        return 0
    return len(text) + text.count(args[0]) * len(args[1])


def _joined(separator: str, pieces: Any = ()) -> str:
    strings = list(pieces)
    _bounded(len(separator) * len(strings) + sum(len(piece) for piece in strings))
    return separator.join(strings)


def _bounded(length: int) -> None:
    if length > TEXT_MAX:
        raise SecurityError(f"the chat template would make a text of {length} characters")


class ChatProgram:
    """A template that is ready to run."""

    def __init__(self, environment: ChatEnvironment, source: str) -> None:
        """Raises `TemplateError` for what does not compile."""
        self._template: Template = environment.from_string(source)
        self._outer = dict(self._template.globals)
        # Only these write what a filter or a function returns as it is.
        raw = (nodes.FilterBlock, nodes.CallBlock, nodes.EvalContextModifier)
        self._is_plain = not any(environment.parse(source).find_all(raw))

    def write(self, values: dict[str, Any]) -> tuple[str, list[str]]:
        """What the template writes, and the pieces in which it does. Raises what it raises."""
        writing = self._template.root_render_func(ChatContext.of(self._template, self._outer, values))
        pieces: list[str] = []
        length = 0
        while len(taken := list(islice(writing, PIECES))) == PIECES:
            pieces += taken
            length += sum(map(len, taken))
            _bounded(length)
        pieces += taken
        text = "".join(pieces)
        _bounded(len(text))
        if not self._is_plain and set(map(type, pieces)) != {str}:
            pieces = [text]  # markup would change what it is added to
        return text, pieces


class _TemplateDict:
    """`dict(...)` in a template, without the type behind it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML and sorts the keys; models were trained on this form.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


def _range(*args: int) -> range:
    numbers = range(*args)
    if len(numbers) > RANGE_MAX:
        raise SecurityError(f"a chat template may count to {RANGE_MAX}, not over {len(numbers)} numbers")
    return numbers


def chat_environment(now: Callable[[], datetime]) -> ChatEnvironment:
    """An environment with what chat templates expect. `now` gives the moment for `strftime_now`."""
    environment = ChatEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise,
        strftime_now=lambda form: now().strftime(form),
        dict=_TemplateDict(),
        namespace=ChatNamespace,
        range=_range,
    )
    return environment
