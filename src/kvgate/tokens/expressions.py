"""What can be told of a template's expression before it runs: is it a constant, which key does it read.

Promises: it only looks at the syntax tree, and says less rather than something wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jinja2 import nodes

# `message.items` is the method, `message['items']` the key: such names take the environment's way.
DICT_METHODS = frozenset(name for name in dir(dict) if not name.startswith("_"))


def names_of_namespaces(tree: nodes.Template) -> Iterator[str]:
    """Variables that hold a namespace somewhere."""
    for one in tree.find_all(nodes.Assign):
        made = one.node.node if isinstance(one.node, nodes.Call) else None
        if isinstance(one.target, nodes.Name) and isinstance(made, nodes.Name) and made.name == "namespace":
            yield one.target.name


def constant(node: nodes.Expr) -> Any:
    """The value that is written there, if one is."""
    if isinstance(node, nodes.Neg):
        number = constant(node.node)
        return -number if type(number) is int else None
    return node.value if isinstance(node, nodes.Const) else None


def key_of(node: nodes.Getattr | nodes.Getitem) -> str | None:
    """The key of a plain object that it reads, if it reads one and nothing else when that is missing."""
    key = node.attr if isinstance(node, nodes.Getattr) else constant(node.arg)
    return key if isinstance(key, str) and not key.startswith("_") and key not in DICT_METHODS else None


def summands(node: nodes.Expr) -> Iterator[nodes.Expr]:
    """What is added up, from left to right."""
    if isinstance(node, nodes.Add):
        yield from summands(node.left)
        yield node.right
    else:
        yield node


def is_simple(node: nodes.Expr) -> bool:
    """Text, a variable, or a field of one: reading it twice is reading it once."""
    if isinstance(node, nodes.Const):
        return type(node.value) is str  # not markup, which changes what is added to it
    if isinstance(node, nodes.Getattr | nodes.Getitem):
        return isinstance(node.node, nodes.Name) and key_of(node) is not None
    return isinstance(node, nodes.Name)
