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

from written_out import written_out

ROOT = Path(__file__).resolve().parents[1]
# Every file that a request passes through. Left out: `record` (it makes classes), and what is called once.
HOT = (
    "core/{records,price,ledger,accounts,shares,line,lifetimes,forecast,places,figures,policy,gate,bound_first,tenancy}",
    "wire/{body,sse,chunks,routes}",
    "wire/dialects/{shape,fields,openai,chats}",
    "wire/engines/{__init__,llamacpp,vllm,sglang}",
    "tokens/{cache,beginnings,pieces}",
    "edge/relay/{client,framing,heads,engine,pool,request,answer,reply,events,life,uncounted,moving,asking,exchange}",
    "edge/relay/{watch,state,finished,body_memory,own_answers,comments,late_answer}",
    "edge/{gatekeeper,gateway,reload,tenants}",
    "edge/observing/{histogram,telemetry,tenant_figures}",
    "edge/counting/{counter,counted,waiting,engine_count,trust,local_count}",
    "edge/upstreams/{upstream,routing,access,neighbours}",
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
    for name in hot_files():
        file = target / name
        file.write_text(written_out(file.read_text("utf-8")), "utf-8")
    # Whatever is not installed, or has no types, is Python's business at run time.
    (target / "mypy.ini").write_text("[mypy]\nignore_missing_imports = True\n")
    command = [sys.executable, "-m", "mypyc", *hot_files()]
    subprocess.run(command, cwd=target, check=True, stdout=sys.stderr)
    for rest in ("build", ".mypy_cache"):
        shutil.rmtree(target / rest, ignore_errors=True)
    (target / "mypy.ini").unlink()


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "compiled"
    try:
        compile_into(where)
    except (OSError, subprocess.CalledProcessError) as failure:
        sys.exit(
            f"cannot compile: {failure}. It takes a C compiler (apt-get install gcc) and mypy (make lint)."
        )
    print(f"compiled into {where}: run with PYTHONPATH={where}")
