"""Does a chat template loop over the parts of a message's content, or does it want one string?

Promises: the answer that vLLM's automatic detection gives for the same template, found in the
template's syntax tree. It renders nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes


def wants_parts(tree: nodes.Template) -> bool:
    """Whether content is handed over as a list of parts ("openai"); else as a string."""
    messages = {"messages"} | set(_aliases(tree, "messages"))
    loops = list(tree.find_all(nodes.For))
    items = {
        loop.target.name
        for loop in loops
        if isinstance(loop.target, nodes.Name) and any(_reads(loop.iter, name) for name in messages)
    }
    in_macros: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        given = _content_parameters(tree, macro, items)
        for loop in macro.find_all(nodes.For):
            in_macros[id(loop)] = given
    return any(_loops_over_content(loop, items, in_macros.get(id(loop))) for loop in loops)


def _loops_over_content(loop: nodes.For, items: set[str], macro_content: set[str] | None) -> bool:
    if any(_reads(loop.iter, name, "content") for name in items):
        return True
    if not isinstance(loop.iter, nodes.Name):
        return False
    return loop.iter.name == "content" if macro_content is None else loop.iter.name in macro_content


def _content_parameters(tree: nodes.Template, macro: nodes.Macro, items: set[str]) -> set[str]:
    """The parameters of a macro that are given a message's content somewhere."""
    names = [argument.name for argument in macro.args]
    found: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        pairs = [*zip(names, call.args, strict=False), *((word.key, word.value) for word in call.kwargs)]
        for name, value in pairs:
            if name in names and any(_reads(value, item, "content") for item in items):
                found.add(name)
    return found


def _aliases(tree: nodes.Template, name: str) -> Iterator[str]:
    """Names that are assigned from `name`, directly or through each other."""
    seen, waiting = {name}, [name]
    assignments = list(tree.find_all(nodes.Assign))
    while waiting:
        known = waiting.pop()
        for assignment in assignments:
            target = assignment.target
            if isinstance(target, nodes.Name) and _reads(assignment.node, known) and target.name not in seen:
                seen.add(target.name)
                waiting.append(target.name)
                yield target.name


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether the expression is the variable (or its `key`), through filters, tests and slices."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == key and _reads_plain(node.node, name)
    return isinstance(node, nodes.Getattr) and node.attr == key and _reads_plain(node.node, name)


def _reads_plain(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
