"""A class that is written out for the compiler is the one that its decorator makes."""

from __future__ import annotations

import ast
import copy
import dataclasses
import pickle
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools"
SOURCE = '''
"""What it is for."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvgate.core.record import record


@record
class Hashable:
    """Says what it is."""

    number: int
    words: tuple[str, ...] = ("a",)

    @property
    def double(self) -> int:
        return 2 * self.number


@dataclass(slots=True)
class Changing:
    number: int
    text: str = ""


@record
class WithFactory:
    numbers: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Frozen:
    number: int
'''


def loaded(name: str, source: str) -> Any:
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, name, "exec"), module.__dict__)
    return module


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    monkeypatch.syspath_prepend(str(TOOLS))
    write = runpy.run_path(str(TOOLS / "written_out.py"))["written_out"]
    text = write(SOURCE)
    assert text.count("def __init__") == 2
    assert text.startswith('"""What it is for."""')
    return loaded("as_decorated", SOURCE), loaded("as_written", text)


@pytest.mark.parametrize("name", ["Hashable", "Changing"])
def test_it_is_made_compared_shown_and_changed_alike(both: tuple[Any, Any], name: str) -> None:
    shown = []
    for module in both:
        cls = getattr(module, name)
        one, same, other = cls(1), cls(number=1), cls(2, "x")
        assert (one == same, one == other, one == 1) == (True, False, False)
        assert dataclasses.replace(one, number=2) == cls(2)
        assert [each.name for each in dataclasses.fields(one)] == list(cls.__match_args__)
        assert copy.deepcopy(one) == one
        assert pickle.loads(pickle.dumps(one)) == one
        shown.append((repr(one), repr(other), cls.__doc__ and "Says" in cls.__doc__))
        with pytest.raises(TypeError):
            cls()
    assert shown[0][:2] == shown[1][:2]
    assert name != "Hashable" or (shown[0][2], shown[1][2]) == (True, True)


def test_equal_ones_have_equal_hashes_where_the_decorator_gives_any(both: tuple[Any, Any]) -> None:
    for module in both:
        assert hash(module.Hashable(1)) == hash(module.Hashable(1, ("a",)))
        assert module.Hashable(4).double == 8
        with pytest.raises(TypeError):
            hash(module.Changing(1))


def test_what_it_cannot_write_out_stays_as_it_is(both: tuple[Any, Any]) -> None:
    _, written = both
    assert written.WithFactory().numbers is not written.WithFactory().numbers
    with pytest.raises(dataclasses.FrozenInstanceError):
        written.Frozen(1).number = 2


def test_every_compiled_file_can_be_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    tool = runpy.run_path(str(TOOLS / "compile.py"))
    names = tool["hot_files"]()
    assert len(names) > 50
    assert [name for name in names if not (ROOT / "src" / name).exists()] == []
    changed = 0
    for name in names:
        source = (ROOT / "src" / name).read_text("utf-8")
        text = tool["written_out"](source)
        compile(text, name, "exec")
        changed += text != source
    assert changed >= 6


def trees(names: list[str]) -> dict[str, ast.Module]:
    return {name: ast.parse((ROOT / "src" / name).read_text("utf-8")) for name in names}


def hot_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.syspath_prepend(str(TOOLS))
    names: list[str] = runpy.run_path(str(TOOLS / "compile.py"))["hot_files"]()
    return names


def caught_twice(tree: ast.Module) -> list[str]:
    """Functions in which one name stands for errors of two kinds: compiled, it has the type of the first."""
    found = []
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            kinds: dict[str, set[str]] = {}
            for node in ast.walk(function):
                if isinstance(node, ast.ExceptHandler) and node.name and node.type:
                    kinds.setdefault(node.name, set()).add(ast.unparse(node.type))
            found += [f"{function.name}: {name}" for name, types in kinds.items() if len(types) > 1]
    return found


def test_no_name_stands_for_two_kinds_of_errors_where_that_would_break(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {name: caught_twice(tree) for name, tree in trees(hot_files(monkeypatch)).items()}
    assert {name: faults for name, faults in found.items() if faults} == {}
    twice = "def f():\n try: g()\n except A as e: h(e)\n except B as e: h(e)\n"
    assert caught_twice(ast.parse(twice)) == ["f: e"]


def test_no_class_that_is_not_compiled_has_a_compiled_base(monkeypatch: pytest.MonkeyPatch) -> None:
    hot = hot_files(monkeypatch)
    compiled = {
        f"{name[:-3].replace('/', '.').removesuffix('.__init__')}.{node.name}"
        for name, tree in trees(hot).items()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not _is_left_open(node)
    }
    others = [str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")]
    found = []
    for name, tree in trees([name for name in others if name not in hot]).items():
        imported = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases = [imported.get(ast.unparse(base), "") for base in node.bases]
                found += [f"{name}: {node.name}" for base in bases if base in compiled]
    assert found == []


def _is_left_open(node: ast.ClassDef) -> bool:
    """Protocols, and what mypyc keeps as Python: enumerations, errors, named tuples."""
    kinds = ("Protocol", "Enum", "Exception", "Error", "NamedTuple")
    return any(ast.unparse(base).endswith(kinds) for base in node.bases)
