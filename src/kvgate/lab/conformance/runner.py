"""Runs cases one after the other and says of each what was found.

Promises: every case is bounded in time; whatever a gateway sends can fail a case, but not end the
run; only a lost scripted engine does, for nothing could be judged without it.
"""

from __future__ import annotations

import asyncio
import fnmatch
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from kvgate.lab.conformance.case import Case, Failed, NotApplicable, Result, Verdict, all_cases
from kvgate.lab.conformance.control import NoEngine
from kvgate.lab.conformance.setting import Setting

CASE_SECONDS = 10.0
END_CHECK_SECONDS = 12.0


def select(pattern: str | None) -> list[Case]:
    """The cases whose name or section matches, with * and ?; a bare word may stand anywhere in it."""
    if pattern is None:
        return all_cases()
    wanted = pattern.lower() if any(c in pattern for c in "*?[") else f"*{pattern.lower()}*"
    return [
        case
        for case in all_cases()
        if fnmatch.fnmatchcase(case.name.lower(), wanted) or fnmatch.fnmatchcase(case.section.lower(), wanted)
    ]


async def run(
    setting: Setting,
    cases: Iterable[Case] | None = None,
    *,
    limit: float = CASE_SECONDS,
    done: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Run the cases in order. `limit`: seconds for each, its end check aside. Raises `NoEngine`."""
    results = []
    for case in all_cases() if cases is None else cases:
        result = await _judge(setting, case, limit)
        results.append(result)
        if done is not None:
            done(result)
    return results


async def _clear(setting: Setting) -> None:
    """What a failed case left behind shall not fail the next one."""
    with suppress(Failed):
        await setting.settle()


async def _judge(setting: Setting, case: Case, limit: float) -> Result:
    started = time.monotonic()

    def result(verdict: Verdict, seen: str) -> Result:
        return Result(case, verdict, seen, round(time.monotonic() - started, 3))

    limit = max(limit, case.seconds)
    try:
        await setting.begin()
        async with asyncio.timeout(limit):
            await case.run(setting)
        if case.ends_idle:
            async with asyncio.timeout(END_CHECK_SECONDS):
                await setting.end_check()
    except NotApplicable as why:
        return result(Verdict.NOT_APPLICABLE, str(why))
    except Failed as seen:
        await _clear(setting)
        return result(Verdict.FAIL, str(seen))
    except TimeoutError as error:
        await _clear(setting)
        return result(Verdict.FAIL, str(error) or f"not over after {limit:g} s")
    except NoEngine:
        raise
    except OSError as error:
        return result(Verdict.FAIL, f"connection: {error}")
    except (ValueError, KeyError, TypeError, LookupError, AttributeError) as error:
        # A gateway may answer anything; what a case cannot read is not what is expected.
        return result(Verdict.FAIL, f"unreadable: {type(error).__name__}: {error}")
    finally:
        setting.leave()
    return result(Verdict.PASS, "")
