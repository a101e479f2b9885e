"""Whether a template wants parts is read off its syntax tree."""

from __future__ import annotations

from datetime import datetime

import pytest

from kvgate.tokens.content_format import wants_parts
from kvgate.tokens.sandbox import chat_environment

LOOP = "{% for message in messages %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        (LOOP, True),
        (LOOP.replace("message.content", "message['content']"), True),
        (LOOP.replace("message.content", "message['content'] | list"), True),
        ("{% set rest = messages[1:] %}" + LOOP.replace("in messages", "in rest"), True),
        (
            "{% for m in messages %}{% set content = m.content %}"
            "{% for c in content %}{% endfor %}{% endfor %}",
            True,
        ),
        (
            "{% macro show(body) %}{% for part in body %}{{ part.text }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
            True,
        ),
        (
            "{% macro show(tools) %}{% for tool in tools %}{{ tool }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.tools) }}{{ m.content }}{% endfor %}",
            False,
        ),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", False),
        ("{% for tool in tools %}{{ tool }}{% endfor %}", False),
        ("", False),
    ],
)
def test_a_template_wants_parts_where_it_loops_over_content(source: str, parts: bool) -> None:
    assert wants_parts(chat_environment(datetime.now).parse(source)) is parts
