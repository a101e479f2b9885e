"""The compiled path of a request does what the Python does. All of its tests: `make test-compiled`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Life-cycle, engines that break, both ways to count, and the laws of the books.
TESTS = (
    "tests/core/test_simulation.py",
    "tests/core/test_places.py",
    "tests/edge/test_breaks.py",
    "tests/edge/test_lifecycle.py",
    "tests/edge/test_own_tokenizer.py",
    "tests/edge/test_upstreams.py",
)
# mypyc's coroutines pass exceptions on in a way that Python 3.12 and later do not like.
OLD_THROW = ("-W", "ignore:the (type, exc, tb) signature of throw():DeprecationWarning")
HAS_COMPILER = shutil.which("gcc") and Path(sysconfig.get_path("include"), "Python.h").exists()


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="no gcc, or no header files of Python")
def test_the_compiled_gateway_passes_the_tests_of_the_python_one(tmp_path: Path) -> None:
    made = tmp_path / "made"
    tool = [sys.executable, str(ROOT / "tools" / "compile.py"), str(made)]
    # What is asked is whether it is right, not whether it is fast.
    quickly = {**os.environ, "MYPYC_OPT_LEVEL": "0"}
    subprocess.run(tool, env=quickly, check=True, capture_output=True, timeout=600)
    env = os.environ | {"PYTHONPATH": str(made), "KVGATE_EPISODES": "2000"}

    version = [sys.executable, "-m", "kvgate", "--version"]
    said = subprocess.run(version, env=env, check=True, capture_output=True, text=True, cwd=tmp_path)
    assert said.stdout.strip().endswith(", compiled")

    marks = "not as_python and not vllm and not tokenizers and not sdks"
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, *OLD_THROW, *TESTS]
    done = subprocess.run(tests, env=env, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
