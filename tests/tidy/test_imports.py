"""The arrows between the rooms hold: cli -> lab -> edge -> wire, tokens -> core, and core is pure.

Read with `ast`, so a forbidden import is found wherever it stands: at the top, inside a function, or
under `if TYPE_CHECKING`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "kvgate"

# What each room may import from the package, besides itself. `config` is a plain record.
ROOMS: dict[str, set[str]] = {
    "core": set(),
    "wire": {"core"},
    "tokens": {"core"},
    "edge": {"core", "wire", "tokens", "config", "version"},
    "lab": {"core", "wire", "tokens", "edge", "config", "version"},
    "cli": {"core", "wire", "tokens", "edge", "lab", "config", "version"},
    "client": {"edge"},
    # Public names for what is in `edge`.
    "asgi": {"edge"},
    "vllm": {"edge"},
    "config": {"core"},
    "version": set(),
}
# Pure modules of the standard library. A new one is added here on purpose or not at all.
CORE_STDLIB = {
    "__future__",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "heapq",
    "itertools",
    "math",
    "typing",
}
# Parsers and bookkeeping only: bytes in, records out.
WIRE_FORBIDDEN = {"asyncio", "time", "random", "socket", "os", "subprocess", "threading", "uvloop", "logging"}


def imports(source: str, module: str) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything that a module imports, however it is written."""
    package = module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            # `from kvgate import edge` names a room only in its last part.
            yield from ((node.lineno, f"{name}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("__import__", "import_module", "importlib.import_module") and node.args:
                # A name that is computed cannot be judged, and is refused where modules are listed.
                what = node.args[0]
                yield node.lineno, str(what.value) if isinstance(what, ast.Constant) else "?"


def faults(source: str, module: str) -> list[str]:
    """What a module imports and must not, one line each."""
    room = module.split(".")[1]
    found = []
    for line, name in imports(source, module):
        top, *rest = name.split(".")
        target = rest[0] if rest else ""
        if top == "kvgate":
            # `from kvgate import X` goes through the front door, which imports core alone.
            wrong = (
                target != room and target not in ROOMS[room] and not (room != "core" and target not in ROOMS)
            )
        elif room == "core":
            wrong = top not in CORE_STDLIB
        else:
            wrong = room == "wire" and top in WIRE_FORBIDDEN
        if wrong:
            found.append(f"{module}:{line} imports {name}")
    return found


def modules() -> dict[str, Path]:
    """Every module inside a room, by dotted name (packages as `name.__init__`)."""
    paths = sorted(SRC.rglob("*.py"))
    names = {".".join(("kvgate", *path.relative_to(SRC).with_suffix("").parts)): path for path in paths}
    # The front door and `python -m kvgate` belong to no room.
    return {name: path for name, path in names.items() if name not in ("kvgate.__init__", "kvgate.__main__")}


def test_every_module_is_in_a_room_with_a_rule() -> None:
    assert [name for name in modules() if name.split(".")[1] not in ROOMS] == []


def test_imports_point_one_way() -> None:
    assert len(modules()) > 10
    assert [fault for name, path in modules().items() for fault in faults(path.read_text(), name)] == []


# The small shells of the library: a lock, a clock and a way to wait around the core.
FRONT = (
    "kvgate.core",
    "kvgate.edge.library.admission",
    "kvgate.edge.library.controller",
    "kvgate.edge.library.ticket",
    "__future__",
)


def test_the_front_door_opens_the_core_and_the_library() -> None:
    source = (SRC / "__init__.py").read_text()
    names = [name for _, name in imports(source, "kvgate.__init__")]
    assert [name for name in names if not name.startswith(FRONT)] == []


def test_the_front_door_brings_in_nothing_but_the_standard_library() -> None:
    program = (
        "import sys; before = set(sys.modules); import kvgate; "
        "print({name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'kvgate'}"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvgate.core.gate", "import asyncio"),
        ("kvgate.core.gate", "from time import monotonic"),
        ("kvgate.core.gate", "def f():\n    import random"),
        ("kvgate.core.gate", "import socket as s"),
        ("kvgate.core.gate", "import os.path"),
        ("kvgate.core.gate", "import logging"),
        ("kvgate.core.gate", "from threading import Lock"),
        ("kvgate.core.gate", "from datetime import datetime"),
        ("kvgate.core.gate", "import httptools"),
        ("kvgate.core.gate", "import importlib\nimportlib.import_module('time')"),
        ("kvgate.core.gate", "__import__(name)"),
        ("kvgate.core.gate", "from kvgate.wire import sse"),
        ("kvgate.core.gate", "from kvgate import edge"),
        ("kvgate.core.gate", "from kvgate import __version__"),
        ("kvgate.core.gate", "from .. import wire"),
        ("kvgate.core.gate", "from ..edge.clock import now"),
        ("kvgate.core.gate", "if TYPE_CHECKING:\n    from kvgate.config import Settings"),
        ("kvgate.wire.sse", "import asyncio"),
        ("kvgate.wire.sse", "from kvgate.edge import clock"),
        ("kvgate.wire.dialects.openai", "from ...edge import clock"),
        ("kvgate.tokens.cache", "from kvgate.wire import sse"),
        ("kvgate.edge.gateway", "from kvgate.lab import simulation"),
        ("kvgate.edge.relay.__init__", "from kvgate.cli import main"),
        ("kvgate.lab.storm", "import kvgate.cli"),
        ("kvgate.config", "from kvgate.edge import clock"),
    ],
)
def test_a_planted_import_against_the_arrows_is_found(module: str, source: str) -> None:
    assert faults(source, module) != []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "kvgate.core.gate",
            "from __future__ import annotations\nimport math\nfrom collections import Counter",
        ),
        ("kvgate.core.gate", "from kvgate.core.records import Ask\nfrom . import ledger"),
        ("kvgate.wire.sse", "import json\nfrom kvgate.core import records\nfrom ..core.price import price"),
        ("kvgate.edge.relay.upstream", "import asyncio, httptools\nfrom kvgate.config import Settings"),
        ("kvgate.edge.gateway", "from kvgate import __version__\nfrom kvgate.wire import sse"),
        ("kvgate.lab.storm", "from kvgate.edge.gateway import Gateway"),
        ("kvgate.cli.__init__", "from . import serve\nfrom kvgate.lab import storm"),
    ],
)
def test_imports_along_the_arrows_pass(module: str, source: str) -> None:
    assert faults(source, module) == []
