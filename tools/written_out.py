"""Writes out what a dataclass decorator would make, so that mypyc compiles it as a plain class.

mypyc keeps a decorated class as the decorator made it: its `__init__` runs as Python, and its fields are
looked up by name. Written out, both are C. Promises: the same fields, defaults, equality, hash, repr
and methods, and `dataclasses.replace` and `fields` work; what is frozen only for mypy is not frozen
here either. Classes that make a default anew each time, or look at themselves when made, are left.
"""

from __future__ import annotations

import ast

# What a decorator asks for, and whether that makes the class hashable.
DECORATORS = {"record": True, "dataclass(slots=True)": False}
LEFT = ("__post_init__", "__init__")


def written_out(source: str) -> str:
    """The source with every such class written out."""
    tree = ast.parse(source)
    found = False
    for at, node in enumerate(tree.body):
        if isinstance(node, ast.ClassDef) and _is_plain(node):
            tree.body[at] = _class(node)
            found = True
    if not found:
        return source
    # After the docstring and the future imports, which have to come first.
    first = next(at for at, node in enumerate(tree.body) if not _comes_first(node))
    tree.body[first:first] = ast.parse("import dataclasses as _dataclasses\nimport typing as _typing").body
    return ast.unparse(ast.fix_missing_locations(tree))


def _comes_first(node: ast.stmt) -> bool:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


def _is_plain(node: ast.ClassDef) -> bool:
    decorators = [ast.unparse(each) for each in node.decorator_list]
    if len(decorators) != 1 or decorators[0] not in DECORATORS or node.bases:
        return False
    methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
    return not any(name in LEFT for name in methods) and not any(
        isinstance(field.value, ast.Call) and ast.unparse(field.value.func) == "field"
        for field in _fields(node)
    )


def _fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
    return [each for each in node.body if isinstance(each, ast.AnnAssign)]


def _class(node: ast.ClassDef) -> ast.ClassDef:
    fields = [(ast.unparse(each.target), ast.unparse(each.annotation), each.value) for each in _fields(node)]
    names = [name for name, _, _ in fields]
    arguments = [
        f"{name}: {kind}" + ("" if value is None else f" = {ast.unparse(value)}")
        for name, kind, value in fields
    ]
    values = "".join(f"self.{name}, " for name in names)
    theirs = "".join(f"other.{name}, " for name in names)
    shown = ", ".join(f"{name}={{self.{name}!r}}" for name in names)
    is_hashable = DECORATORS[ast.unparse(node.decorator_list[0])]
    lines = [
        f"class {node.name}:",
        f"    __match_args__: _typing.ClassVar[tuple[str, ...]] = {tuple(names)!r}",
        "    __dataclass_fields__: _typing.ClassVar[dict[str, _typing.Any]] = "
        f"getattr(_dataclasses.make_dataclass({node.name!r}, {names!r}), '__dataclass_fields__')",
        f"    def __init__(self, {', '.join(arguments)}) -> None:",
        *[f"        self.{name} = {name}" for name in names],
        "    def __eq__(self, other: object) -> bool:",
        f"        return isinstance(other, {node.name}) and ({values}) == ({theirs})",
        "    def __repr__(self) -> str:",
        f"        return f'{node.name}({shown})'",
        "    def __reduce__(self) -> _typing.Any:",
        f"        return {node.name}, ({values})",
        "    def __hash__(self) -> int:",
        f"        return hash(({values}))" if is_hashable else "        raise TypeError('unhashable')",
    ]
    made = ast.parse("\n".join(lines)).body[0]
    assert isinstance(made, ast.ClassDef)
    rest = [each for each in node.body if not isinstance(each, ast.AnnAssign)]
    made.body = [*(each for each in rest if _comes_first(each)), *made.body]
    made.body += [each for each in rest if not _comes_first(each)]
    return made
