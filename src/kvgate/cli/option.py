"""What one option of `kvgate serve` is, and the kinds of numbers that options are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import click

from kvgate.cli.addresses import ParamType
from kvgate.config import Settings

ENVIRONMENT_PREFIX = "KVGATE"
DEFAULTS = Settings()


class Number(click.FloatRange):
    """A finite number: nan passes every range check, and infinite time-outs hide dead peers."""

    name = "NUMBER"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class Share(Number):
    """A share, or `auto`."""

    name = "NUMBER|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == "auto" else super().convert(value, param, ctx)


@dataclass(frozen=True, slots=True)
class Option:
    """One row: `--name`, `KVGATE_NAME` and the file key `name` all set `fields` of Settings."""

    name: str
    fields: tuple[str, ...]
    type: ParamType
    section: str
    help: str
    metavar: str | None = None
    multiple: bool = False

    @property
    def parameter(self) -> str:
        return self.name.replace("-", "_")

    @property
    def environment(self) -> str:
        return f"{ENVIRONMENT_PREFIX}_{self.parameter.upper()}"

    @property
    def default(self) -> Any:
        """The default of Settings, written as a user would write it."""
        values = [getattr(DEFAULTS, field) for field in self.fields]
        if isinstance(values[0], bool):
            return str(values[0]).lower()
        return f"{values[0]}:{values[1]}" if len(values) == 2 else values[0]
