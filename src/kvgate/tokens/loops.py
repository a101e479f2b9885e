"""Loops of a template that ask for nothing but fields of `loop`, written with a plain counter.

Jinja's own `loop` object takes a call of Python for each turn and each field. Promises: `number_loops`
changes only loops in which `loop` is read by these fields alone, and in the loop's own scope; when such a
loop does not go over a list, its counter is Jinja's `loop` object, and `field_of_loop` reads that.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes

# Two more targets of such a loop: the number of the turn, and the list. No name of a template's own.
TURN, ITEMS = "kvgate_turn_", "kvgate_items_"

# Each field in terms of the two; those of the second group need the list.
_BY_TURN = {"index0": "{turn}", "index": "{turn} + 1", "first": "{turn} == 0"}
_BY_ITEMS = {
    "last": "{turn} + 1 == len({items})",
    "length": "len({items})",
    "revindex": "len({items}) - {turn}",
    "revindex0": "len({items}) - {turn} - 1",
    "previtem": "({items}[{turn} - 1] if {turn} else undefined('there is no previous item'))",
    "nextitem": "({items}[{turn} + 1] if {turn} + 1 < len({items}) else undefined('there is no next item'))",
}
_FIELDS = _BY_TURN | _BY_ITEMS

# Their bodies are functions of their own, or other templates, which may look at `loop` when it is over.
_OWN_SCOPES = (nodes.Macro, nodes.CallBlock, nodes.Block, nodes.Include, nodes.Import, nodes.FromImport)


def number_loops(tree: nodes.Template) -> None:
    """Gives loops a counter in place of `loop`, where that is the same."""
    # From the inside out: a loop's body is looked at when the loops in it are done.
    for number, loop in enumerate(reversed(list(tree.find_all(nodes.For)))):
        reads = list(_reads(loop.body))
        if not reads or loop.recursive or loop.test is not None:
            continue
        fields = [read for read in reads if isinstance(read, nodes.Getattr)]
        if len(fields) < len(reads):
            continue
        names = [f"{TURN}{number}"]
        if any(field.attr in _BY_ITEMS for field in fields):
            names.append(f"{ITEMS}{number}")
        for field in fields:
            field.node = nodes.Name(names[0], "load", lineno=field.lineno)
        counters = [nodes.Name(name, "store", lineno=loop.lineno) for name in names]
        loop.target = nodes.Tuple([loop.target, *counters], "store", lineno=loop.lineno)


def counters_of(loop: nodes.For) -> int:
    """How many counters a loop was given: 0 when it was left as it was."""
    items = loop.target.items if isinstance(loop.target, nodes.Tuple) else []
    return sum(isinstance(item, nodes.Name) and item.name.startswith((TURN, ITEMS)) for item in items)


def is_counter(node: nodes.Node) -> bool:
    """Whether it stands for `loop` in a loop with counters."""
    return isinstance(node, nodes.Name) and node.name.startswith(TURN)


def items_name(turn: str) -> str:
    """The variable of the template with the list whose turns `turn` counts."""
    return ITEMS + turn.removeprefix(TURN)


def needs_items(field: str) -> bool:
    """Whether the field is read off the list."""
    return field in _BY_ITEMS


def field_of_loop(field: str, turn: str, items: str) -> str:
    """The field as an expression of Python; `turn` and `items` are its variables."""
    value = _FIELDS[field].format(turn=turn, items=items)
    return f"({value} if type({turn}) is int else environment.getattr({turn}, {field!r}))"


def _reads(body: list[nodes.Node]) -> Iterator[nodes.Node]:
    """Every use of a loop's `loop`: as a field that is known here, or whatever else stands in the way."""
    for node in body:
        is_field = isinstance(node, nodes.Getattr) and _is_loop(node.node) and node.attr in _FIELDS
        if is_field or _is_loop(node) or isinstance(node, _OWN_SCOPES):
            yield node
        elif isinstance(node, nodes.For):
            # In its body, `loop` is its own; a condition of it becomes a function of its own.
            yield from _reads([node.iter, *node.else_])
            if node.test is not None:
                yield from (name for name in node.test.find_all(nodes.Name) if _is_loop(name))
                yield from [node.test] if _is_loop(node.test) else ()
        else:
            yield from _reads(list(node.iter_child_nodes()))


def _is_loop(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == "loop"
