"""`kvgate doctor`: what it says of real and recorded engines, for people and for scripts."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from engine_pages import llamacpp, model_list, ollama, pages, vllm, vllm_metrics
from kvgate.cli.doctor import doctor
from kvgate.cli.plan import plan
from kvgate.edge.embedded import EmbeddedEngine
from kvgate.lab.tiny_gguf import write_tiny_gguf
from kvgate.wire.engines.found import Page


def run(url: str, *options: str, key: str | None = None) -> Result:
    environment = {"KVGATE_API_KEY": key or ""}
    return CliRunner().invoke(doctor, [url, *options], env=environment, catch_exceptions=False)


def report(url: str, *options: str, key: str | None = None) -> tuple[int, dict[str, Any]]:
    result = run(url, "--json", *options, key=key)
    return result.exit_code, json.loads(result.stdout)


def codes(plain: dict[str, Any]) -> set[str]:
    return {finding["code"] for finding in plain["findings"]}


@contextmanager
def site(served: Mapping[str, Page], key: str | None = None) -> Iterator[str]:
    """An address with these pages, behind `key` where there is one."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = served.get(self.path, Page(404, "{}"))
            if key is not None and self.headers.get("authorization") != f"Bearer {key}":
                page = Page(401, '{"error":"Unauthorized"}')
            body = page.text.encode()
            self.send_response(page.status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def unified(model: Path) -> Iterator[str]:
    with EmbeddedEngine.start(cells=2048, slots=4, model=model) as running:
        yield running.url


def test_a_real_llama_cpp_is_found_and_its_open_question_is_asked(unified: str) -> None:
    status, plain = report(unified)

    assert status == 0
    assert (plain["engine"], plain["models"], plain["reachable"]) == ("llamacpp", ["tiny"], True)
    assert (plain["facts"]["total_blocks"], plain["facts"]["max_seqs"]) == (2048, 4)
    assert {"unified_or_split", "no_api_key"} <= codes(plain)
    assert report(unified, "--strict")[0] == 1


def test_a_real_llama_cpp_whose_size_is_given_is_told_what_a_unified_cache_means(unified: str) -> None:
    status, plain = report(unified, "--total-blocks", "2048")

    assert status == 0
    assert "unified_cache" in codes(plain)
    assert "unified_or_split" not in codes(plain)


def test_a_real_split_llama_cpp_has_nothing_unsafe_once_its_size_is_given(model: Path) -> None:
    with EmbeddedEngine.start(cells=2048, slots=4, unified=False, model=model) as split:
        status, plain = report(split.url, "--total-blocks", "2048")

    assert status == 0
    assert plain["facts"]["context"] == 512
    assert not {"unified_or_split", "unified_cache"} & codes(plain)


def test_people_get_a_table_with_sources_and_fixes(unified: str) -> None:
    shown = run(unified).stdout

    assert "llamacpp" in shown
    assert "/props: total_slots" in shown
    assert "Fix: say what llama-server was started with" in shown
    assert "at once of prompt 500 + cap 500" in shown


def test_nothing_at_the_address_is_status_2() -> None:
    result = run("http://127.0.0.1:9")

    assert result.exit_code == 2
    assert "does not answer" in result.stdout
    status, plain = report("http://127.0.0.1:9")
    assert (status, plain["reachable"], plain["safe"]) == (2, False, False)


def test_an_engine_that_nobody_knows_is_status_1_and_asks() -> None:
    with site(pages({"/v1/models": model_list("somebody", "m")})) as url:
        status, plain = report(url)
        assert status == 1
        assert "--engine NAME" in plain["unknown"][0]
        given = ("--engine", "generic", "--total-blocks", "100", "--block-size", "16", "--context", "512")
        assert report(url, *given)[0] == 0


def test_unsafe_findings_are_status_1_and_come_first() -> None:
    with site(vllm()) as url:
        status, plain = report(url, "--total-blocks", "64")

    assert (status, plain["safe"]) == (1, False)
    assert plain["findings"][0]["code"] == "capacity_above_engine"
    assert "at most 63" in plain["findings"][0]["fix"]


def test_a_hybrid_is_priced_once_its_configuration_is_given(tmp_path: Path) -> None:
    config = {
        "model_type": "gpt_oss", "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "hidden_size": 2880, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    labels = {"block_size": "16", "num_gpu_blocks": "21845", "kv_cache_size_tokens": "310381",
              "kv_cache_max_concurrency": "2.368"}  # fmt: skip
    with site(vllm(labels, context=131_072)) as url:
        assert report(url)[0] == 1
        status, plain = report(url, "--model-config", str(file))

    assert (status, plain["facts"]["groups"], plain["exact"]) == (0, 2, True)


def test_a_configuration_that_is_none_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for text in ("x", "[]"):
        file.write_text(text)
        result = run("http://127.0.0.1:9", "--model-config", str(file))
        assert result.exit_code == 2
        assert "--model-config" in result.stderr


def test_the_key_comes_from_the_environment_and_its_absence_is_noticed() -> None:
    with site(llamacpp(slots=1), key="s3cret") as url:
        without, with_key = report(url, "--engine", "llamacpp"), report(url, key="s3cret")

    assert without[0] == 1
    assert "key_needed" in codes(without[1])
    assert any("--api-key-env NAME" in finding["fix"] for finding in without[1]["findings"])
    assert with_key[0] == 0
    assert not {"no_api_key", "key_needed"} & codes(with_key[1])
    assert "s3cret" not in json.dumps(with_key[1])


def test_requests_that_kvgate_has_not_sent_are_foreign_load() -> None:
    name = 'vllm:num_requests_running{engine="0",model_name="tiny"} '
    busy = vllm() | pages({"/metrics": vllm_metrics().replace(f"{name}0.0", f"{name}5.0")})
    for ours, is_foreign in ((5, False), (4, True)):
        status_page = pages({"/status": {"pools": [{"reserved_seqs": ours}]}})
        with site(busy) as url, site(status_page) as admin:
            status, plain = report(url, "--admin", admin)
            assert ("foreign_load" in codes(plain)) is is_foreign
            assert status == int(is_foreign)
    with site(busy) as url:
        assert "load" in codes(report(url)[1])
        assert "admin_unread" in codes(report(url, "--admin", "http://127.0.0.1:9")[1])


def test_what_an_unset_cap_costs_is_a_note_with_the_option_that_mends_it() -> None:
    with site(vllm()) as url:
        status, plain = report(url)
    (note,) = [finding for finding in plain["findings"] if finding["code"] == "unset_caps"]

    assert (status, note["level"]) == (0, "note")
    assert "up to 32 of 56 blocks: 1 at once" in note["what"]
    assert "generation_config" in note["what"]
    assert "--default-output-cap N" in note["fix"]
    with site(ollama(4096)) as url:
        assert "unset_caps" not in codes(report(url)[1])
    # As many as it has slots fit with any cap.
    with site(llamacpp(512)) as url:
        assert "unset_caps" not in codes(report(url, "--total-blocks", "4096")[1])
        assert "unset_caps" in codes(report(url)[1])


def test_several_processes_ranks_and_preemptions_are_named() -> None:
    counter = 'vllm:num_preemptions_total{engine="0",model_name="tiny"} '
    text = vllm_metrics({"num_gpu_blocks": "128"}, {"num_gpu_blocks": "128"}, one_process=False)
    served = vllm() | pages({"/metrics": text.replace(f"{counter}0.0", f"{counter}31.0")})
    with site(served) as url:
        _, plain = report(url)

    assert {"several_api_servers", "several_ranks", "preempted", "prefix_caching"} <= codes(plain)
    assert (plain["ranks"], plain["facts"]["total_blocks"], plain["preemptions"]) == (2, 63, 31)
    assert all(finding["what"] for finding in plain["findings"])
    assert all(finding["fix"] for finding in plain["findings"] if finding["level"] != "note")


def test_a_plan_takes_the_blocks_of_a_running_engine() -> None:
    config = {
        "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 64, "hidden_size": 128, "max_position_embeddings": 131_072,
    }  # fmt: skip
    arguments = ["--model-config", "-", "--json", "--shape", "200:1000", "--upstream"]
    with site(vllm()) as url:
        result = CliRunner().invoke(plan, [*arguments, url], input=json.dumps(config), catch_exceptions=False)
    shown = json.loads(result.stdout)

    assert (shown["total_blocks"], shown["block_size"], shown["context"]) == (63, 128, 4096)
    assert (shown["shapes"][0]["blocks"], shown["shapes"][0]["concurrent"]) == (10, 5)
