"""A case of the conformance suite, the registry of all of them, and what one yields.

Promise: names are unique; a case says what is expected and where it was reported; it passes unless
it raises. It may not know which gateway it looks at.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from kvgate.lab.conformance.setting import Setting

Run: TypeAlias = Callable[["Setting"], Awaitable[None]]


class Verdict(enum.StrEnum):
    """What a case found. `NOT_APPLICABLE` only where it could not be run."""

    PASS = "pass"
    FAIL = "fail"
    NOT_APPLICABLE = "n/a"


class Failed(Exception):
    """What was seen is not what is expected."""


class NotApplicable(Exception):
    """The case cannot be run on this gateway; says why."""


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that a gateway must do. `seconds`: its limit, where that of the run is too short.

    `ends_idle`: whether the standard end check is part of it (no request open at the engine, and
    one the size of the whole pool is admitted).
    """

    name: str
    section: str
    title: str
    reference: str
    expected: str
    run: Run
    seconds: float
    ends_idle: bool
    place: int


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one case. `seen` is empty where it passed."""

    case: Case
    verdict: Verdict
    seen: str
    seconds: float


CASES: dict[str, Case] = {}


def all_cases() -> list[Case]:
    """Every case that is registered, section by section."""
    return sorted(CASES.values(), key=lambda case: case.place)


class Section:
    """Registers the cases of one file: `@section.case("FC-14", ...)`. `place`: its turn in the run."""

    def __init__(self, title: str, place: int, *, ends_idle: bool = False) -> None:
        self._title = title
        self._place = place
        self._ends_idle = ends_idle

    def case(
        self,
        name: str,
        title: str,
        *,
        expected: str,
        reference: str = "",
        seconds: float = 0.0,
        ends_idle: bool | None = None,
    ) -> Callable[[Run], Run]:
        def register(run: Run) -> Run:
            if name in CASES:
                raise ValueError(f"two cases are named {name}")
            idle = self._ends_idle if ends_idle is None else ends_idle
            CASES[name] = Case(name, self._title, title, reference, expected, run, seconds, idle, self._place)
            return run

        return register


def expect(true: bool, seen: str) -> None:
    """Fail the case, saying what was seen, unless `true`."""
    if not true:
        raise Failed(seen)
