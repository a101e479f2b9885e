"""`@record`: a dataclass that nobody may change, at the price of one that may be.

Promise: for mypy it is frozen. At run time it is not: a frozen dataclass costs five times as much to
make, and some of these are made several times for each request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

_Record = TypeVar("_Record")


@dataclass_transform(frozen_default=True)
def record(cls: type[_Record]) -> type[_Record]:
    """As `dataclass(frozen=True, slots=True)`; equal ones have equal hashes."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
