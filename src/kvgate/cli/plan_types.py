"""What `kvgate plan` takes on the command line that no other command does: sizes of memory, and shapes."""

from __future__ import annotations

import re
from typing import Any

import click

from kvgate.cli.addresses import ParamType

_UNITS = {
    "": 2**30,
    "g": 2**30,
    "gib": 2**30,
    "gb": 10**9,
    "m": 2**20,
    "mib": 2**20,
    "mb": 10**6,
    "tib": 2**40,
}


class Size(ParamType):
    """A size of memory: 80GiB, 24GB; a bare number is GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(value))
        unit = _UNITS.get(found[2].lower()) if found else None
        if found is None or unit is None or float(found[1]) == 0:
            self.fail(f"{value!r} is not a size of memory; write 80GiB or 24GB", param, ctx)
        return int(float(found[1]) * unit)


class Shape(ParamType):
    """PROMPT:CAP in tokens; the cap may be `unset`."""

    name = "prompt:cap"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int | None]:
        if isinstance(value, tuple):
            return value
        found = re.fullmatch(r"(\d+):(\d+|unset)", str(value))
        if found is None or found[2] == "0":
            self.fail(f"{value!r} is not PROMPT:CAP; write 2000:500, or 2000:unset for no cap", param, ctx)
        return int(found[1]), None if found[2] == "unset" else int(found[2])
