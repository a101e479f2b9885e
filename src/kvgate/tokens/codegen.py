"""Jinja's code generator with short ways for what chat templates do with plain data.

A chat template reads `message.role` and the like a dozen times for each message, and Jinja makes a
call of each. Promises: the same values as with the call. Every short way asks first whether the value
is of the very type (`dict`, `list`, `str`, ...) for which it is the same; everything else is left to the
environment's own, guarded, lookup. Every loop asks the environment for its turns first, which counts
them; methods of strings that make no more text than they are given are not counted, as operators are not.
"""

from __future__ import annotations

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.idtracking import VAR_LOAD_ALIAS, VAR_LOAD_PARAMETER, VAR_LOAD_RESOLVE

from kvgate.tokens import loops
from kvgate.tokens.expressions import (
    DICT_METHODS,
    constant,
    is_simple,
    key_of,
    names_of_namespaces,
    summands,
)

# Methods of strings that make no more text than they are given, and format nothing.
PLAIN_STR_METHODS = frozenset(
    (
        *("startswith", "endswith", "strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "lower"),
        *("upper", "title", "capitalize", "find", "rfind", "count", "index", "partition", "rpartition"),
        *("isdigit", "isspace", "isalpha", "isalnum", "removeprefix", "removesuffix"),
    )
)
# Tests that are one expression of Python. Of a key that is missing, those of the second group say the
# same as of `False`.
_TESTS = {"true": "({} is True)", "false": "({} is False)"}
_TESTS_LIKE_FALSE = {"none": "({} is None)", "string": "isinstance({}, str)"}
# How a loop gets its turns, by the number of counters beside each item.
_WAYS = ("turns", "numbered", "numbered_with_items")


class ChatCodeGenerator(CodeGenerator):
    """Does the most frequent things with plain data in the generated code itself."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        loops.number_loops(node)
        self._namespaces = frozenset(names_of_namespaces(node))
        # What is only asked whether it is true, and iterables of loops. Kept by identity, and so kept alive.
        self._tested: dict[int, nodes.Node] = {}
        self._iterables: dict[int, tuple[nodes.Node, str]] = {}
        # Variables of Python with what the names that a loop sets are outside of it.
        self._outside: dict[str, str] = {}
        self._adding = False
        self.writeline("from kvgate.tokens.namespaces import ChatNamespace")
        self.writeline("_loop_vars = dict()")
        super().visit_Template(node, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        # Jinja takes no node types of others; this one is written by extensions only, and by none here.
        node.iter = nodes.MarkSafe(node.iter, lineno=node.lineno)
        self._iterables[id(node.iter)] = node.iter, _WAYS[loops.counters_of(node)]
        before, self._outside = self._outside, {}
        inside = frame.inner()
        inside.symbols.analyze_node(node, for_branch="body")
        for action, name in inside.symbols.loads.values():
            if action == VAR_LOAD_RESOLVE and name != "loop":
                self._outside[name] = self.temporary_identifier()
                self.writeline(f"{self._outside[name]} = {self.get_resolve_func()}({name!r})")
        super().visit_For(node, frame)
        self._outside = before

    def visit_MarkSafe(self, node: nodes.MarkSafe, frame: Frame) -> None:
        """A loop's iterable."""
        self.write(f"environment.{self._iterables[id(node)][1]}(context, ")
        self.visit(node.expr, frame)
        self.write(")")

    def enter_frame(self, frame: Frame) -> None:
        if frame.loop_frame:
            # Names that a loop sets are looked for outside at each turn, where nothing changes meanwhile.
            loads = frame.symbols.loads
            for variable, (action, name) in loads.items():
                if action == VAR_LOAD_RESOLVE and name in self._outside:
                    loads[variable] = VAR_LOAD_ALIAS, self._outside[name]
        super().enter_frame(frame)

    def pop_assign_tracking(self, frame: Frame) -> None:
        if frame.loop_frame:
            # Jinja keeps a loop's variables for functions that ask for the context. There are none here.
            self._assign_stack.pop()
        else:
            super().pop_assign_tracking(frame)

    def writeline(self, x: str, node: nodes.Node | None = None, extra: int = 0) -> None:
        # For the same reason they are one empty dict, and not a new one at each turn.
        if x != "_loop_vars = {}":
            super().writeline(x, node, extra)

    def visit_If(self, node: nodes.If, frame: Frame) -> None:
        for one in (node, *node.elif_):
            self._only_tested(one.test)
        super().visit_If(node, frame)

    def visit_CondExpr(self, node: nodes.CondExpr, frame: Frame) -> None:
        self._only_tested(node.test)
        super().visit_CondExpr(node, frame)

    def visit_Not(self, node: nodes.UnaryExpr, frame: Frame) -> None:
        self._only_tested(node.node)
        super().visit_Not(node, frame)

    def visit_Test(self, node: nodes.Test, frame: Frame) -> None:
        asked = node.node
        if not isinstance(asked, nodes.Name | nodes.Getattr | nodes.Getitem) or node.args or node.kwargs:
            super().visit_Test(node, frame)
        elif node.name in ("defined", "undefined"):
            self.write("(" if node.name == "defined" else "(not (")
            self._defined(asked, frame)
            self.write(")" if node.name == "defined" else "))")
        elif node.name in _TESTS or node.name in _TESTS_LIKE_FALSE:
            if node.name in _TESTS_LIKE_FALSE:
                self._only_tested(asked)
            before, after = (_TESTS | _TESTS_LIKE_FALSE)[node.name].split("{}")
            self.write(before)
            self.visit(asked, frame)
            self.write(after)
        else:
            super().visit_Test(node, frame)

    def visit_Filter(self, node: nodes.Filter, frame: Frame) -> None:
        plain = not (node.args or node.kwargs or node.dyn_args or node.dyn_kwargs)
        if node.name == "trim" and plain and node.node is not None and not frame.eval_ctx.volatile:
            self.write("(kv.strip() if type(kv := ")
            self.visit(node.node, frame)
            self.write(f") is str else {self.filters['trim']}(kv))")
        else:
            super().visit_Filter(node, frame)

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:
        method = node.node
        if (
            isinstance(method, nodes.Getattr)
            and method.attr in PLAIN_STR_METHODS
            and all(isinstance(arg, nodes.Const | nodes.Name) for arg in node.args)
            and not (forward_caller or node.kwargs or node.dyn_args or node.dyn_kwargs)
        ):
            self.write(f"(kv.{method.attr}(")
            for arg in node.args:
                self.visit(arg, frame)
                self.write(", ")
            self.write(") if type(kv := ")
            self.visit(method.node, frame)
            self.write(f") is str else environment.call(context, environment.getattr(kv, {method.attr!r})")
            frames = {"_loop_vars": frame.loop_frame, "_block_vars": frame.block_frame}
            self.signature(node, frame, {name: name for name, inside in frames.items() if inside})
            self.write("))")
        else:
            super().visit_Call(node, frame, forward_caller=forward_caller)

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        operands = list(summands(node))
        texts = [isinstance(operand, nodes.Const) for operand in operands]
        if self._adding or len(texts) < 3 or all(texts) or not all(map(is_simple, operands)):
            super().visit_Add(node, frame)
            return
        # All in one, if they are strings. What is simple has no effect, so that it may be read again.
        written, asked = "", []
        for operand in operands:
            if isinstance(operand, nodes.Const):
                written += str(operand.value).replace("{", "{{").replace("}", "}}")
            else:
                asked.append((self.temporary_identifier(), operand))
                written += f"{{{asked[-1][0]}}}"
        self.write(f"(f{written!r} if ")
        for number, (name, operand) in enumerate(asked):
            self.write(f"{' and ' if number else ''}type({name} := ")
            self.visit(operand, frame)
            self.write(") is str")
        self.write(" else ")
        self._adding = True
        super().visit_Add(node, frame)
        self._adding = False
        self.write(")")

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:
        owner, name = node.node, node.attr
        if isinstance(owner, nodes.Name) and loops.is_counter(owner):
            turn = frame.symbols.ref(owner.name)
            items = frame.symbols.ref(loops.items_name(owner.name)) if loops.needs_items(name) else ""
            self.write(loops.field_of_loop(name, turn, items))
        elif name.startswith("_"):
            self._guarded("getattr", owner, name, frame)
        elif isinstance(owner, nodes.Name) and owner.name in self._namespaces:
            self.write(f"(kv.held[{name!r}] if type(kv := ")
            self.visit(owner, frame)
            self.write(f") is ChatNamespace and {name!r} in kv.held else environment.getattr(kv, {name!r}))")
        elif name in DICT_METHODS:
            self._guarded("getattr", owner, name, frame)
        else:
            self._short("getattr", node, name, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        key = constant(node.arg)
        if isinstance(key, str):
            self._short("getitem", node, key, frame)
        elif type(key) is int:
            least = key + 1 if key >= 0 else -key
            self.write(f"(kv[{key}] if type(kv := ")
            self.visit(node.node, frame)
            self.write(f") is list and len(kv) >= {least} else environment.getitem(kv, {key}))")
        elif isinstance(node.arg, nodes.Add | nodes.Sub | nodes.Getattr):
            owner, index = self.temporary_identifier(), self.temporary_identifier()
            # Both are evaluated, in their order, whatever they are.
            self.write(f"({owner}[{index}] if (type({owner} := ")
            self.visit(node.node, frame)
            self.write(f") is list) & (type({index} := ")
            self.visit(node.arg, frame)
            self.write(f") is int) and -len({owner}) <= {index} < len({owner})")
            self.write(f" else environment.getitem({owner}, {index}))")
        else:
            super().visit_Getitem(node, frame)

    def _short(self, lookup: str, node: nodes.Getattr | nodes.Getitem, key: str, frame: Frame) -> None:
        owner = self._variable(node.node, frame) or "kv"
        # What is missing is not true, and is not made where that is all that is asked.
        tested = id(node) in self._tested and key_of(node) is not None
        self.write(
            f"(({owner}[{key!r}] if {key!r} in {owner} else False)" if tested else f"({owner}[{key!r}]"
        )
        # The condition is evaluated first, so that the name is bound before it is read; an owner
        # that uses it too has done so by then.
        self.write(" if type(" if owner != "kv" else " if type(kv := ")
        self.visit(node.node, frame)
        self.write(f") is dict{'' if tested else f' and {key!r} in {owner}'}")
        self.write(f" else environment.{lookup}({owner}, {key!r}))")

    def _variable(self, node: nodes.Node, frame: Frame) -> str | None:
        """The variable of Python that a name is, where it is always set: the item of a loop."""
        if not isinstance(node, nodes.Name):
            return None
        variable = frame.symbols.ref(node.name)
        load = frame.symbols.find_load(variable)
        is_set = load is not None and load[0] == VAR_LOAD_PARAMETER
        return variable if is_set and not self.parameter_is_undeclared(variable) else None

    def _defined(self, asked: nodes.Name | nodes.Getattr | nodes.Getitem, frame: Frame) -> None:
        if isinstance(asked, nodes.Name):
            variable = frame.symbols.ref(asked.name)
            self.write(f"{variable} is not missing and not isinstance({variable}, Undefined)")
            return
        key = key_of(asked)
        if key is None or loops.is_counter(asked.node):
            self.write("not isinstance(")
            self.visit(asked, frame)
            self.write(", Undefined)")
            return
        lookup = "getattr" if isinstance(asked, nodes.Getattr) else "getitem"
        self.write(f"({key!r} in kv and not isinstance(kv[{key!r}], Undefined)) if type(kv := ")
        self.visit(asked.node, frame)
        self.write(f") is dict else not isinstance(environment.{lookup}(kv, {key!r}), Undefined)")

    def _guarded(self, lookup: str, owner: nodes.Node, key: str, frame: Frame) -> None:
        self.write(f"environment.{lookup}(")
        self.visit(owner, frame)
        self.write(f", {key!r})")

    def _only_tested(self, node: nodes.Node) -> None:
        self._tested[id(node)] = node
        if isinstance(node, nodes.And | nodes.Or):
            self._only_tested(node.left)
            self._only_tested(node.right)
