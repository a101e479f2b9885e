"""The short ways of the generated code say what Jinja says, for every kind of value.

Each template is rendered twice: as chats are, and in Jinja's own sandbox with its own code generator.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from random import Random
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvgate.tokens.codegen import ChatCodeGenerator
from kvgate.tokens.sandbox import ChatProgram, chat_environment

SEED = 20_261_130
RANDOM_TEMPLATES = 300
OURS = chat_environment(lambda: datetime(2026, 1, 2))
JINJAS = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])

CALL = {"function": {"name": "f", "arguments": {"a": [1, 2]}}, "items": 7}
VALUES: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "system", "content": " be brief "},
            {"role": "user", "content": "<a>hi</a>x", "name": "u", "items": "key"},
            {"role": "assistant", "content": "", "tool_calls": [CALL, CALL], "reasoning": None, "held": 1},
            {"role": "tool", "content": [{"type": "text", "text": "1"}, {"type": "image"}]},
        ],
        "tools": None,
        "flag": True,
        "number": 3,
    },
    {"messages": [{"role": "user", "content": None}, {"role": 5, "content": 7}, {}], "content": "outside"},
    {"messages": [], "tools": [], "flag": False, "number": True, "item": "outside"},
    {"messages": "text", "tools": {"a": 1}, "flag": None, "number": -1},
    {"messages": [["role", "content"], "ab", 3, None], "tools": [{"b": {"c": None}}], "number": 0},
]


def outcome(write: Callable[[dict[str, Any]], str], values: dict[str, Any]) -> str:
    """What is written, or that it fails: which error comes first is nobody's promise."""
    try:
        return write(values)
    except (TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
        return "fails"


def same(source: str) -> set[str]:
    ours, jinjas = ChatProgram(OURS, source), JINJAS.from_string(source)
    found = set()
    for values in VALUES:
        written = outcome(lambda given: ours.write(given)[0], values)
        assert written == outcome(jinjas.render, values), f"{source!r} with {values}"
        found.add(written)
    return found


FIELDS = ("index", "index0", "first", "last", "length", "revindex", "revindex0", "depth")
EACH = (
    "messages",
    "messages[::-1]",
    "messages[1:]",
    "messages | reverse",
    "messages | list",
    "messages | batch(2)",
    "range(3)",
    "(1, 2)",
    "'ab'",
    "{'a': 1, 'b': 2}",
    "messages | map(attribute='role')",
)


@pytest.mark.parametrize("over", EACH)
@pytest.mark.parametrize("field", FIELDS)
def test_fields_of_a_loop(over: str, field: str) -> None:
    assert same("{% for m in " + over + " %}[{{ loop." + field + " }}]{% endfor %}") != {"fails"}


@pytest.mark.parametrize("over", EACH)
def test_neighbours_in_a_loop(over: str) -> None:
    body = (
        "{{ loop.previtem is defined }}{{ loop.nextitem is defined }}{{ loop.previtem }}|{{ loop.nextitem }}"
    )
    assert same("{% for m in " + over + " %}" + body + "{% endfor %}") != {"fails"}


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% for n in messages[loop.index0:] %}{{ loop.index }}{% endfor %}"
        "{{ loop.index }}{% else %}none{% endfor %}",
        "{% for m in messages %}{% for n in [] %}{% else %}{{ loop.last }}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% for n in [1, 2] if loop is defined %}{{ n }}{% endfor %}{{ loop.first }}"
        "{% endfor %}",
        "{% for m in messages if m.role != 'user' %}{{ loop.index }}{{ loop.last }}{% endfor %}",
        "{% for m in messages %}{{ loop.cycle('a', 'b') }}{{ loop.index }}{% endfor %}",
        "{% for m in messages %}{{ loop.changed(m) }}{{ loop.index }}{% endfor %}",
        "{% for m in messages %}{% set l = loop %}{{ l.index }}{{ loop.index }}{% endfor %}",
        "{% for m in messages %}{{ loop | string | length > 3 }}{{ loop.index }}{% endfor %}",
        "{% for m in messages %}{% macro f() %}{{ loop.index }}{% endmacro %}{{ f() }}{% endfor %}",
        "{% macro f(c) %}{% for x in c %}{{ loop.index }}{{ x }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ f(m.content) }}{{ loop.last }}{% endfor %}",
        "{% macro f() %}<{{ caller() }}>{% endmacro %}{% for m in messages %}{% call f() %}{{ loop.index }}"
        "{% endcall %}{% endfor %}",
        "{% for a in [[1, [2]], [3]] recursive %}{{ loop.index }}{% if a is iterable %}"
        "{{ loop(a) }}{% endif %}"
        "{% endfor %}",
        "{% for a, b in [(1, 2), (3, 4)] %}{{ a }}{{ b }}{{ loop.last }}{{ loop.index0 }}{% endfor %}",
        "{% for k, v in {'x': 1}.items() %}{{ k }}{{ v }}{{ loop.length }}{% endfor %}",
        "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ loop.index }}"
        "{% if loop.index0 > 1 %}{% break %}{% endif %}{% endfor %}",
        "{% set g = messages | map('string') %}{% for a in g %}{{ loop.first }}{% break %}{% endfor %}"
        "{% for b in g %}{{ loop.index }}{% endfor %}",
        "{% for m in messages %}{% set m = loop.index %}{{ m }}{% endfor %}{{ m }}",
        "{% for m in messages %}{{ loop.nothing is defined }}{{ loop['index'] }}{% endfor %}",
        "{% for m in messages %}{% set x %}{{ loop.index }}{% endset %}{{ x }}{% endfor %}{{ x }}",
        "{% for m in messages %}{{ m.content[loop.index0] }}{{ messages[loop.index0 - 1].role }}{% endfor %}",
        "{{ loop is defined }}{% for m in messages %}{{ loop.first }}{% endfor %}{{ loop is defined }}",
    ],
)
def test_loops_of_all_kinds(source: str) -> None:
    assert same(source) != {"fails"}


@pytest.mark.parametrize(
    "source",
    [
        "{% for item in messages %}{% if item is mapping and item.role == 'user' %}"
        "{% set content = 1 %}{% endif %}"
        "{{ content }}{% endfor %}{{ content }}",
        "{% set content = 'top' %}{% for m in messages %}{% if loop.last %}{% set content = 2 %}{% endif %}"
        "{{ content }}{% endfor %}{{ content }}",
        "{% for m in messages %}{% for n in [1, 2] %}{% if n == 2 %}{% set content = n %}"
        "{% endif %}{{ content }}"
        "{% endfor %}{{ content }}{% endfor %}",
        "{% macro f() %}{% for m in [1, 2] %}{% if m == 2 %}{% set content = m %}{% endif %}{{ content }}"
        "{% endfor %}{% endmacro %}{{ f() }}{% set content = 'late' %}{{ f() }}",
        "{% for m in [1, 2] %}{% set number = number + 1 %}{{ number }}{% endfor %}{{ number }}",
    ],
)
def test_names_that_a_loop_sets(source: str) -> None:
    assert same(source) != {"fails"}


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(a=1, items=2) %}{{ ns.a }}{{ ns.items }}{{ ns['a'] }}"
        "{{ ns.b is defined }}{{ ns.b }}",
        "{% set ns = namespace({'held': 4}, b=3) %}{{ ns.b }}{{ ns.held }}{{ ns['held'] }}{{ ns }}"
        "{{ ns | attr('b') }}",
        "{% set ns = namespace() %}{{ ns.held is defined }}{{ ns['held'] is defined }}"
        "{{ ns | attr('held') }}{{ ns[0] }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% set ns = namespace(n=none) %}{% if ns.n is none and not ns.x %}{{ ns.n }}{% endif %}"
        "{{ ns.x is none }}",
        "{% set ns = {'a': 1} %}{{ ns.a }}{% set ns = namespace(a=2) %}{{ ns.a }}{{ ns.a is defined }}",
        "{% set ns = namespace(a=1) %}{% macro f() %}{{ ns.a }}{% endmacro %}{{ f() }}"
        "{% set ns.a = 2 %}{{ f() }}",
        "{% set ns = {'a': 1} %}{% set ns.a = 2 %}{{ ns.a }}",
        "{% set ns = namespace(a=1) %}{{ ns.__class__ }}{{ ns.__init__ }}{{ ns | length }}",
        "{% set ns = namespace(f='x') %}{{ ns.f.upper() }}{{ 'a' + ns.f + 'b' }}{{ ns is mapping }}",
    ],
)
def test_namespaces(source: str) -> None:
    same(source)


OWNERS = ("messages[1]", "item", "tools", "absent", "number")
READS = (
    *("{}.role", "{}['role']", "{}.content", "{}.tool_calls", "{}.items", "{}['items']", "{}.held", "{}[0]"),
    *("{}[1 - 1]", "{}[number - 3]", "{}[-1]", "{}[99]", "{}.absent", "{}.absent.more", "{}.content.text"),
    *("{}.content.strip()", "{}.content[0].text", "{}.keys()", "{}[true]", "{}[number]", "{}.role.upper()"),
    *("{}.content.split('a')[-1]", "{}.content.split('a')[0].lstrip('<')", "{}.content.startswith('<a>')"),
    *("{}.content.split(sep='a')", "{}.startswith('t')", "{}.content.endswith(('x', 'y'))", "{}.role | trim"),
    *("{}.content | trim", "{}.content | trim('x')", "'<' + {}.role + '>' + {}.content + '\\n'"),
    *(
        "{}.role + '{{' + {}.content",
        "'a{}b' + {}.role + '%}}'",
        "1 + {}.role + 2",
        "'<' + ({}.role | e) + '>'",
    ),
    *("('<' | safe) + {}.role + '>'", "{}.role ~ {}.content", "'<' + number + '>' + {}.role"),
)
FORMS = (
    "{{{{ {} }}}}",
    "{{{{ ({}) is defined }}}}",
    "{{{{ ({}) is undefined }}}}",
    "{{{{ ({}) is none }}}}",
    "{{{{ ({}) is not none }}}}",
    "{{{{ ({}) is string }}}}",
    "{{{{ ({}) is false }}}}",
    "{{{{ ({}) is true }}}}",
    "{{{{ 1 if ({}) else 2 }}}}",
    "{{{{ ({}) or 'no' }}}}",
    "{{{{ not ({}) }}}}",
    "{{% if ({}) and flag or not ({}) %}}1{{% elif ({}) %}}2{{% else %}}3{{% endif %}}",
    "{{% set v = ({}) %}}{{{{ v is defined }}}}{{{{ v }}}}",
    "{{{{ [({})] | length }}}}{{{{ ({}) == 'user' }}}}",
    "{{% for x in [messages, 1] %}}{{{{ ({}) }}}}{{{{ loop.last }}}}{{% endfor %}}",
)


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("read", READS)
def test_reads_of_plain_data_in_every_place(owner: str, read: str) -> None:
    expression = read.replace("{}", owner).replace("{{", "{").replace("}}", "}")
    for form in FORMS if owner in ("messages[1]", "item") else FORMS[:2]:
        source = form.replace("{}", expression).replace("{{", "{").replace("}}", "}")
        same("{% for item in messages %}" + source + "{% endfor %}" if owner == "item" else source)


def expression(random: Random, depth: int) -> str:
    if depth <= 0 or random.random() < 0.25:
        return random.choice(
            ["m", "messages", "ns", "flag", "number", "absent", "'x'", "''", "0", "-1", "none", "content"]
        )
    one, two = expression(random, depth - 1), expression(random, depth - 1)
    fields = ("role", "content", "tool_calls", "function", "items", "n", "held", "text")
    return random.choice(
        [
            f"{one}.{random.choice(fields)}",
            f"{one}['{random.choice(fields)}']",
            f"{one}[{two}]",
            f"{one}[{random.choice((0, 1, -1))}]",
            f"({one} + {two})",
            f"('<' + {one} + {two})",
            f"({one} ~ {two})",
            f"({one} {random.choice(('==', '!=', 'in', 'and', 'or'))} {two})",
            f"(not {one})",
            f"({one} is {random.choice(('defined', 'none', 'string', 'mapping', 'true', 'iterable'))})",
            f"({one} if {two} else {one})",
            f"{one}.{random.choice(('strip', 'upper', 'split', 'lstrip'))}()",
            f"{one}.{random.choice(('startswith', 'split', 'find'))}({two})",
            f"({one} | {random.choice(('trim', 'length', 'list', 'first', 'string'))})",
            random.choice(["loop.index0", "loop.last", "loop.previtem", "loop.first", "loop.nextitem"]),
        ]
    )


def statements(random: Random, depth: int) -> str:
    parts = []
    for _ in range(random.randrange(1, 4)):
        value = expression(random, random.randrange(3))
        inner = statements(random, depth - 1) if depth else "."
        parts.append(
            random.choice(
                [
                    f"{{{{ {value} }}}}",
                    f"{{% if {value} %}}{inner}{{% else %}}-{{% endif %}}",
                    f"{{% for m in {random.choice(('messages', value))} %}}{inner}{{% endfor %}}",
                    f"{{% set content = {value} %}}",
                    f"{{% set ns.n = {value} %}}",
                    f"{{% set x %}}{inner}{{% endset %}}{{{{ x }}}}",
                ]
            )
        )
    return "".join(parts)


def test_templates_made_at_random() -> None:
    random = Random(SEED)
    written = 0
    for _ in range(RANDOM_TEMPLATES):
        written += same("{% set ns = namespace(n=1) %}" + statements(random, 2)) != {"fails"}
    assert written > RANDOM_TEMPLATES / 4, "most of what was compared failed"


def test_nothing_that_a_template_can_call_asks_for_the_context() -> None:
    """The code keeps no variables of loops for it."""
    callables = [*OURS.globals.values(), *OURS.filters.values(), *OURS.tests.values()]
    asking = [one for one in callables if getattr(one, "jinja_pass_arg", None) is not None]

    assert not [
        one for one in asking if "context" in str(one.jinja_pass_arg) and one in OURS.globals.values()
    ]
    assert OURS.code_generator_class is ChatCodeGenerator
