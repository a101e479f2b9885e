"""How many processes serve the same application, so that one pool is not given out several times.

Promises: several worker processes that would each reserve the whole pool are never let through:
their number is read from the server's command line or environment, and where it says nothing, the
second process notices by itself that there is a first. Standard library only; Linux.

The noticing: each worker claims a numbered name in the kernel (an abstract socket, which is gone with
its process) under its supervisor's process id. Processes on other machines, or with another
supervisor, are not seen: give each its share, or `workers`.
"""

from __future__ import annotations

import multiprocessing
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# The options and variables under which servers take the number of their worker processes.
_FLAGS = {
    "uvicorn": ("--workers",),
    "fastapi": ("--workers",),
    "hypercorn": ("--workers", "-w"),
    "granian": ("--workers",),
    "gunicorn": ("--workers", "-w"),
    "litestar": ("--web-concurrency", "--wc", "-W"),
}
_VARIABLES = {
    "uvicorn": ("UVICORN_WORKERS", "WEB_CONCURRENCY"),
    "fastapi": ("WEB_CONCURRENCY",),
    "granian": ("GRANIAN_WORKERS",),
    "gunicorn": ("WEB_CONCURRENCY",),
    "litestar": ("LITESTAR_WEB_CONCURRENCY", "WEB_CONCURRENCY"),
}
_claims: dict[tuple[int, str], tuple[int, socket.socket]] = {}


@dataclass(frozen=True, slots=True)
class Workers:
    """`declared`: how many the server was told to start (None: it does not say). `supervisor`: the
    process that starts them; None where this process was not started by one."""

    declared: int | None
    supervisor: int | None


class SeveralWorkers(RuntimeError):
    """This process must not serve: others hold the same pool. The message says what to do."""


def find(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> Workers:
    """What can be known from inside one process."""
    argv = sys.argv if argv is None else argv
    environ = os.environ if environ is None else environ
    server = _server_of(argv)
    is_worker = multiprocessing.parent_process() is not None or "gunicorn.arbiter" in sys.modules
    supervisor = os.getppid() if is_worker else None
    if server is None:
        return Workers(None, supervisor)
    told = [*argv[1:], *(shlex.split(environ.get("GUNICORN_CMD_ARGS", "")) if server == "gunicorn" else ())]
    number = _option(told, _FLAGS[server])
    for name in _VARIABLES.get(server, ()):
        number = number or _number(environ.get(name))
    return Workers(number, supervisor)


def claim(supervisor: int, most: int, name: str = "pool") -> int:
    """This process's own number among the workers of `supervisor`, from 0. Kept until it ends.

    Raises `SeveralWorkers` where `most` others have one.
    """
    held = _claims.get((os.getpid(), name))
    if held is not None:
        return held[0]
    for number in range(most):
        taken = socket.socket(socket.AF_UNIX)
        try:
            taken.bind(f"\0kvgate/{os.getuid()}/{supervisor}/{_start_of(supervisor)}/{name}/{number}")
        except OSError:
            taken.close()
            continue
        _claims[(os.getpid(), name)] = (number, taken)
        return number
    raise SeveralWorkers(
        f"more than {most} worker process{'es' * (most > 1)} would each give out the pool. "
        "Run one worker, or tell kvgate how many there are: workers=N divides the pool by N"
    )


def _server_of(argv: Sequence[str]) -> str | None:
    if not argv:
        return None
    path = Path(argv[0])
    # `python -m uvicorn` runs uvicorn/__main__.py.
    name = path.parent.name if path.name == "__main__.py" else path.name
    return name if name in _FLAGS else None


def _option(argv: Sequence[str], flags: Sequence[str]) -> int | None:
    for index, word in enumerate(argv):
        for flag in flags:
            if word == flag and index + 1 < len(argv):
                return _number(argv[index + 1])
            if word.startswith(f"{flag}="):
                return _number(word[len(flag) + 1 :])
            if len(flag) == 2 and word.startswith(flag):
                return _number(word[2:])
    return None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() and int(text) > 0 else None


def _start_of(pid: int) -> str:
    """When a process began, in the kernel's ticks: a number that a later process does not have."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "0"
