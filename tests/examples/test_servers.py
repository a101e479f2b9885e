"""The servers among the examples run, and the files for operating the gateway say what they should."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from kvgate.cli.options import OPTIONS
from kvgate.lab.tiny_gguf import write_tiny_gguf

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_fastapi_around_llama_cpp_serves_a_storm_and_refuses_what_never_fits(tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    write_tiny_gguf(model)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, EXAMPLES / "fastapi_llamacpp.py", "--port", str(port), "--model", model],
            stdout=log,
            stderr=log,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            end = time.monotonic() + 30
            while True:
                try:
                    assert client.get("/books").json()["reserved_blocks"] == 0
                    break
                except httpx.TransportError:
                    assert server.poll() is None, (tmp_path / "log").read_text()
                    assert time.monotonic() < end
                    time.sleep(0.05)

            def one(number: int) -> httpx.Response:
                return client.post("/generate", json={"prompt": f"story {number}", "max_tokens": 300})

            with ThreadPoolExecutor(8) as pool:
                answers = list(pool.map(one, range(8)))
            assert [answer.status_code for answer in answers] == [200] * 8, answers[0].text
            assert {answer.headers["x-kvgate-output-cap"] for answer in answers} == {"300"}
            # Six of them fit into 1,843 usable cells at once.
            assert any(int(answer.headers["x-kvgate-wait-ms"]) > 0 for answer in answers)
            never = client.post("/generate", json={"prompt": "x" * 3000})
            assert (never.status_code, never.json()["error"]["code"]) == (413, "context_length_exceeded")
            assert client.get("/books").json()["reserved_blocks"] == 0
    finally:
        server.terminate()
        server.wait(20)


def test_the_vllm_example_is_valid_shell_and_names_the_middleware() -> None:
    script = EXAMPLES / "vllm_middleware.sh"
    subprocess.run(["sh", "-n", script], check=True)
    assert "--middleware kvgate.vllm.Middleware" in script.read_text()
    from kvgate.vllm import Middleware

    assert Middleware.__name__ == "Middleware"


def test_the_systemd_unit_is_valid_and_its_options_exist() -> None:
    unit = EXAMPLES / "kvgate.service"
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(unit)
    assert set(parser.sections()) == {"Unit", "Service", "Install"}
    _options_exist(unit.read_text())
    if shutil.which("systemd-analyze"):
        said = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True).stderr
        # The command is not installed where the unit says; nothing else may be wrong.
        assert [
            line for line in said.splitlines() if "kvgate.service" in line and "is not executable" not in line
        ] == []


def test_the_container_file_copies_what_there_is_and_its_options_exist() -> None:
    text = (EXAMPLES / "Containerfile").read_text()
    for line in re.findall(r"^COPY (.+)$", text, re.M):
        for name in line.split()[:-1]:
            assert (EXAMPLES.parent / name).exists(), name
    (entry,) = re.findall(r"^ENTRYPOINT (.+)$", text, re.M)
    assert json.loads(entry)[:2] == ["kvgate", "serve"]
    _options_exist(entry)


def _options_exist(text: str) -> None:
    known = {f"--{option.name}" for option in OPTIONS}
    variables = {f"KVGATE_{option.name.upper().replace('-', '_')}" for option in OPTIONS}
    used = set(re.findall(r"--[a-z][a-z-]+", "\n".join(re.findall(r"^(?:ExecStart=|\[).*", text, re.M))))
    assert used
    assert used <= known
    assert set(re.findall(r"KVGATE_[A-Z_]+", text)) <= variables
