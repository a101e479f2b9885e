"""Compiles the path of a request to C with mypyc: the same code, at about half the CPU.

    python tools/compile.py [DIRECTORY]          (make compiled)
    PYTHONPATH=build/compiled kvgate serve ...

Needs a C compiler. Promise: the sources are the ones that are tested as Python; nothing is patched,
and what is not listed here runs as it is. Delete the directory to go back.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Every file that a request passes through. Left out: `record` (it makes classes), `heads` (a list of
# its own kind, which mypyc cannot make), and what is called once.
HOT = (
    "core/{records,price,ledger,accounts,shares,line,lifetimes,forecast,places,figures,policy,gate}",
    "wire/{body,sse,chunks,routes}",
    "wire/dialects/{shape,fields,openai,chats}",
    "edge/relay/{client,framing,engine,answer,reply,events,life,asking,exchange,watch,state}",
    "edge/relay/{finished,body_memory,answers,comments,late_answer}",
    "edge/{gatekeeper}",
    "edge/observing/{histogram}",
    "edge/counting/{counter,counted,engine_count}",
    "edge/upstreams/{upstream,routing}",
)


def hot_files() -> list[str]:
    """Paths below the directory that holds the package."""
    files = []
    for group in HOT:
        folder, _, names = group.rstrip("}").rpartition("/{")
        files += [f"kvgate/{folder}/{name}.py" for name in names.split(",")]
    return files


def compile_into(target: Path) -> None:
    """Copies the package to `target` and compiles it there. Raises `CalledProcessError`."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "src", target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    mypyc = Path(sys.executable).with_name("mypyc")
    subprocess.run([sys.executable, str(mypyc), *hot_files()], cwd=target, check=True, stdout=sys.stderr)
    shutil.rmtree(target / "build", ignore_errors=True)


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "compiled"
    try:
        compile_into(where)
    except (OSError, subprocess.CalledProcessError) as failure:
        sys.exit(
            f"cannot compile: {failure}. It takes a C compiler (apt-get install gcc) and mypy (make lint)."
        )
    print(f"compiled into {where}: run with PYTHONPATH={where}")
