"""Options whose value is a table of the config file: `[[upstream]]`, `[[tenant]]`, `[[class]]`.

Promises: a key that does not exist is an error that names those which do; a value is held to the same
rules as the flag for it; on the command line a table is written as in TOML, between its braces.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import click

from kvgate.cli.addresses import EngineUrl, ParamType
from kvgate.config import UpstreamSettings
from kvgate.core.tenancy import ClassRule, TenantRule
from kvgate.edge.tenants import class_rules, tenant_rules
from kvgate.wire.engines.known import ENGINES

_COUNTS = (
    *("total_blocks", "block_size", "context", "max_seqs", "ranks"),
    *("tensor_parallel", "pipeline_parallel", "max_batched_tokens"),
)


class Table(ParamType):
    """A table, or text that becomes one."""

    name = "TABLE"

    def table(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Mapping[str, Any]:
        if isinstance(value, Mapping):
            return value
        try:
            return dict(tomllib.loads(f"table = {{{value}}}")["table"])
        except tomllib.TOMLDecodeError as wrong:
            self.fail(f'{value!r} is not written as NAME="text",NAME=1: {wrong}', param, ctx)


class UpstreamTable(Table):
    """An engine: its URL, or a table with `url` and what is special about it."""

    name = "URL"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> UpstreamSettings:
        if isinstance(value, UpstreamSettings):
            return value
        if not isinstance(value, Mapping):
            return UpstreamSettings(EngineUrl().convert(value, param, ctx))
        found: dict[str, Any] = {}
        known = [field.name for field in fields(UpstreamSettings)]
        for key, each in value.items():
            name = key.replace("-", "_")
            if name not in known:
                choices = ", ".join(name.replace("_", "-") for name in known)
                self.fail(f"[[upstream]] has no {key!r}. There are {choices}.", param, ctx)
            try:
                found[name] = _upstream_value(name, each)
            except ValueError as wrong:
                self.fail(f"[[upstream]]: {key} {wrong}", param, ctx)
        if "url" not in found:
            self.fail("[[upstream]] needs a url", param, ctx)
        return UpstreamSettings(**found | {"url": EngineUrl().convert(found["url"], param, ctx)})


class TenantTable(Table):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> TenantRule:
        if isinstance(value, TenantRule):
            return value
        rule: TenantRule = _rule(self, tenant_rules, value, param, ctx)
        return rule


class ClassTable(Table):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> ClassRule:
        if isinstance(value, ClassRule):
            return value
        rule: ClassRule = _rule(self, class_rules, value, param, ctx)
        return rule


def _rule(
    kind: Table,
    read: Callable[[list[Mapping[str, Any]]], tuple[Any, ...]],
    value: Any,
    param: click.Parameter | None,
    ctx: click.Context | None,
) -> Any:
    try:
        return read([kind.table(value, param, ctx)])[0]
    except ValueError as wrong:
        kind.fail(str(wrong), param, ctx)


def _upstream_value(name: str, value: Any) -> Any:
    """The value for a field of `UpstreamSettings`. Raises `ValueError`."""
    if name == "aliases":
        if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
            raise ValueError('must be a table, as in { "gpt-4o" = "the-model" }')
        return tuple(value.items())
    if name == "models":
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise ValueError("must be a list of strings")
        return tuple(value)
    if name in _COUNTS or name == "lookahead":
        least = 0 if name == "lookahead" else 1
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"must be a whole number of at least {least}, got {value!r}")
        return value
    if name == "safety_fraction":
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value != "auto" and not (is_number and 0 < value <= 1):
            raise ValueError(f'must be above 0 and at most 1, or "auto", got {value!r}')
        return value
    if name == "replace_client_keys":
        if not isinstance(value, bool):
            raise ValueError(f"must be true or false, got {value!r}")
        return value
    if not isinstance(value, str):
        raise ValueError(f"must be a string, got {value!r}")
    if name == "engine" and value not in ENGINES:
        raise ValueError(f"must be one of {', '.join(sorted(ENGINES))}, got {value!r}")
    return value
