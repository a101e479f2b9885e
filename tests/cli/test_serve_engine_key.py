"""`kvgate serve` before an engine that asks for a key: how it is given, and that it shows up nowhere."""

from __future__ import annotations

import http.client
import os
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_doctor import site
from test_serve import PATIENCE, Serving, process

from engine_pages import vllm
from kvgate.cli import main

SECRET = "sk-engine-4711"
PORTS = ("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")


def test_the_key_is_read_and_is_in_no_page_log_or_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", SECRET)
    with site(vllm(), key=SECRET) as url:
        arguments = ("serve", *PORTS, "--upstream", url, "--upstream-api-key-env", "ENGINE_KEY")
        with process("kvgate", *arguments) as child:
            gate = Serving(child)
            shown = Path(f"/proc/{child.pid}/cmdline").read_bytes()
            for method, page in (("GET", "/status"), ("GET", "/metrics"), ("POST", "/reload")):
                client = http.client.HTTPConnection("127.0.0.1", gate.admin, timeout=PATIENCE)
                client.request(method, page)
                shown += client.getresponse().read()
                client.close()
            os.kill(child.pid, signal.SIGTERM)
            status, out, err = child.end()
    assert status == 0
    assert b'"total_blocks": 63' in shown.replace(b":63", b": 63")
    assert SECRET not in shown.decode() + out + err


def test_an_engine_that_refuses_is_status_2_with_the_option_that_mends_it(tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("sk-wrong")
    with site(vllm(), key=SECRET) as url:
        for options in ((), ("--upstream-api-key-file", str(tmp_path / "wrong"))):
            with process("kvgate", "serve", *PORTS, "--upstream", url, *options) as child:
                status, out, err = child.end()
            assert status == 2
            assert "asks for an API key" in err
            assert "--upstream-api-key-env NAME" in err
            assert "Traceback" not in err
            assert "sk-wrong" not in out + err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--upstream-api-key-env", "NOT_SET_HERE"), "the variable NOT_SET_HERE is empty or not set"),
        (("--upstream-api-key-env", "PATH", "--upstream-api-key-file", __file__), "not in both"),
        (("--upstream-api-key-file", __file__), "an API key is one word"),
    ],
)
def test_a_key_that_cannot_be_used_is_told_without_being_shown(options: tuple[str, ...], words: str) -> None:
    result = CliRunner().invoke(main, ["serve", "--upstream", "http://127.0.0.1:9", *options])

    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


def test_the_embedded_engine_asks_for_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", SECRET)
    result = CliRunner().invoke(main, ["serve", "--upstream-api-key-env", "ENGINE_KEY"])

    assert result.exit_code == 2
    assert "--upstream-api-key-env: only with --upstream URL" in " ".join(result.output.split())


def test_a_table_has_its_own_key_and_a_wrong_value_is_told(tmp_path: Path) -> None:
    file = tmp_path / "kvgate.toml"
    for line, words in (
        ('api-key-env = "NOT_SET_HERE"', "NOT_SET_HERE"),
        ("api-key-env = 5", "must be a string"),
        ('replace-client-keys = "yes"', "must be true or false"),
        ('api-key = "sk-x"', "has no 'api-key'"),
    ):
        file.write_text(f'[[upstream]]\nurl = "http://127.0.0.1:9"\n{line}\n')
        result = CliRunner().invoke(main, ["serve", "--config", str(file)])
        assert result.exit_code == 2
        assert words in " ".join(result.output.split())
        assert "sk-x" not in result.output
