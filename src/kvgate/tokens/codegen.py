"""Jinja's code generator with a short way for reading a field of a plain object.

A chat template reads `message.role` and the like a dozen times for each message, and Jinja makes a
call of each. Promises: the same values as with the call; everything but a present key of a `dict`, or
a field of the loop, is left to the environment's own, guarded, lookup. Every loop asks the
environment for its turns first, which counts them.
"""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame

# `message.items` is the method, `message['items']` the key: such names take the environment's way.
DICT_METHODS = frozenset(name for name in dir(dict) if not name.startswith("_"))

# What a loop tells about itself; all are plain properties.
LOOP_FIELDS = frozenset(("index", "index0", "first", "last", "length", "previtem", "nextitem", "revindex"))


class ChatCodeGenerator(CodeGenerator):
    """Reads present keys of dicts, and fields of loops, in the generated code itself."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        # Jinja takes no node types of others; this one is written by extensions only, and by none here.
        node.iter = nodes.MarkSafe(node.iter, lineno=node.lineno)
        super().visit_For(node, frame)

    def visit_MarkSafe(self, node: nodes.MarkSafe, frame: Frame) -> None:
        """A loop's iterable."""
        self.write("environment.turns(context, ")
        self.visit(node.expr, frame)
        self.write(")")

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:
        owner = node.node
        if isinstance(owner, nodes.Name) and owner.name == "loop" and node.attr in LOOP_FIELDS:
            self.write(f"(kv.{node.attr} if type(kv := ")
            self.visit(owner, frame)
            self.write(f") is LoopContext else environment.getattr(kv, {node.attr!r}))")
        elif node.attr.startswith("_") or node.attr in DICT_METHODS:
            self._call("getattr", node.node, node.attr, frame)
        else:
            self._short("getattr", node.node, node.attr, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        key = node.arg.value if isinstance(node.arg, nodes.Const) else None
        if isinstance(key, str):
            self._short("getitem", node.node, key, frame)
        else:
            super().visit_Getitem(node, frame)

    def _short(self, lookup: str, owner: nodes.Node, key: str, frame: Frame) -> None:
        # The condition is evaluated first, so that the name is bound before it is read; an owner
        # that uses it too has done so by then.
        self.write(f"(kv[{key!r}] if type(kv := ")
        self.visit(owner, frame)
        self.write(f") is dict and {key!r} in kv else environment.{lookup}(kv, {key!r}))")

    def _call(self, lookup: str, owner: nodes.Node, key: Any, frame: Frame) -> None:
        self.write(f"environment.{lookup}(")
        self.visit(owner, frame)
        self.write(f", {key!r})")
