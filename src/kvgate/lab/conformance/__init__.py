"""A public conformance suite for gateways in front of LLM engines, from what went wrong in the field.

Promises: black box (the gateway is reached through its URL alone, the engine behind it is the
scripted one); each case is named, says what is expected and where it was reported, and yields pass,
fail with what was seen, or n/a with the reason. `docs/conformance.md` lists all of them.
"""

from kvgate.lab.conformance import (
    coming_back,
    drain,
    faults,
    framing,
    http,
    invalid,
    lifecycle,
    memory,
    refusals,
    smuggling,
    streaming,
)
from kvgate.lab.conformance.case import CASES, Case, Result, Verdict, all_cases
from kvgate.lab.conformance.control import EngineControl, NoEngine
from kvgate.lab.conformance.runner import CASE_SECONDS, run, select
from kvgate.lab.conformance.setting import Pool, Setting, Unreachable

# Importing a section registers its cases.
SECTIONS = (
    coming_back,
    lifecycle,
    faults,
    http,
    smuggling,
    framing,
    streaming,
    invalid,
    memory,
    refusals,
    drain,
)

__all__ = [
    "CASES",
    "CASE_SECONDS",
    "SECTIONS",
    "Case",
    "EngineControl",
    "NoEngine",
    "Pool",
    "Result",
    "Setting",
    "Unreachable",
    "Verdict",
    "all_cases",
    "run",
    "select",
]
