"""Child processes on a core of their own: start, stop, and what they have used.

CPU time is read from each process's own CPU clock (nanoseconds, user and system, all threads, those
that have ended included), memory from /proc. Linux only.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

STOP_WITHIN = 5.0
PAGE = os.sysconf("SC_PAGE_SIZE")


def cores() -> tuple[set[int], set[int]]:
    """(engine and client, gateway): two cores apart where there are two."""
    mine = sorted(os.sched_getaffinity(0))
    return {mine[0]}, {mine[1] if len(mine) > 1 else mine[0]}


@contextmanager
def running(
    command: Sequence[str], on: set[int], *, log: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A child and all that it starts, ended with the block. Its output goes to `log`."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVGATE_")} | dict(env or {})
    with log.open("wb") as out:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # one group, so that its children end with it
            preexec_fn=lambda: os.sched_setaffinity(0, on),
        )
    try:
        yield child
    finally:
        stop(child)


def stop(child: subprocess.Popen[bytes]) -> None:
    """End the child's whole group: politely, then not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        try:
            child.wait(STOP_WITHIN)
        except subprocess.TimeoutExpired:
            continue
        if number == signal.SIGTERM and not group_lives(child.pid):
            return


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tree(pid: int) -> list[int]:
    """The process and everything below it."""
    found, at = [pid], 0
    while at < len(found):
        try:
            for task in Path(f"/proc/{found[at]}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            pass  # it has just ended
        at += 1
    return found


def cpu_us(pids: Sequence[int]) -> float:
    """CPU microseconds that these processes have used so far."""
    total = 0
    for pid in pids:
        try:
            # The kernel's number for "CPU clock of process PID", see clock_getcpuclockid(3).
            total += time.clock_gettime_ns((~pid << 3) | 2)
        except OSError:
            continue  # it has ended; its time is lost to us
    return total / 1000


def resident_bytes(pids: Sequence[int]) -> int:
    """Sum of the resident sets; pages that two processes share count in both."""
    total = 0
    for pid in pids:
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
        except OSError:
            continue
    return total
