"""The `namespace(...)` of chat templates: what a template may change from within a loop.

Promises: it behaves like Jinja's namespace in a template, except that it takes no name that begins with
an underscore. Its values stand in a plain field, `held`, for generated code and for the environment; a
template reaches them through those two only.
"""

from __future__ import annotations

from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace


class ChatNamespace(Namespace):
    """Jinja's namespace, without a call of Python for each look at it."""

    __slots__ = ("held",)
    held: dict[str, Any]

    # Jinja's own looks up its values here; the environment does that in its place.
    __getattribute__ = object.__getattribute__

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _checked(name)
        self.held = values

    def __getattr__(self, name: str) -> Any:
        # For filters that ask whether there is such an attribute.
        if name in self.held:
            return self.held[name]
        raise AttributeError(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.held[_checked(name)] = value

    def __repr__(self) -> str:
        return f"<Namespace {self.held!r}>"


def _checked(name: Any) -> Any:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")
    return name
