"""Put each client library into an environment of its own: `python tests/sdks/install.py [NAME ...]`.

They go into `.cache/sdks/NAME`, which git ignores; about 400 MB for all of them. Versions that behave
differently stand beside each other, because both are out there.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

PLACE = Path(__file__).parents[2] / ".cache" / "sdks"
ENVIRONMENTS: dict[str, list[str]] = {
    "openai-1": ["openai==1.109.*"],
    "openai-2": ["openai==2.8.*"],
    "openai-3": ["openai==3.*"],
    "anthropic-0": ["anthropic==0.75.*"],
    "anthropic-2": ["anthropic==2.*"],
    "litellm": ["litellm==1.*"],
    "urllib3": ["urllib3==2.*"],
    "httpx-retries": ["httpx-retries", "httpx"],
}


def python_of(name: str) -> Path:
    return PLACE / name / "bin" / "python"


def install(name: str) -> None:
    done = PLACE / name / ".ready"
    wanted = "\n".join(ENVIRONMENTS[name])
    if done.exists() and done.read_text() == wanted:
        return
    print(f"installing {name}: {', '.join(ENVIRONMENTS[name])}", flush=True)
    venv.create(PLACE / name, clear=True, with_pip=True)
    pip = [str(python_of(name)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *ENVIRONMENTS[name]], check=True)
    done.write_text(wanted)


if __name__ == "__main__":
    for each in sys.argv[1:] or ENVIRONMENTS:
        install(each)
