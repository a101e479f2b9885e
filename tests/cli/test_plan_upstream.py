"""`kvgate plan --upstream`: the pool of an engine that runs, of every kind, and what is not known of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from test_doctor import site

from engine_pages import llamacpp, model_list, ollama, pages, sglang, tgi, vllm
from kvgate.cli.doctor import doctor
from kvgate.cli.plan import plan
from kvgate.core.gate import Gate
from kvgate.core.records import Ask, Granted
from kvgate.edge.embedded import EmbeddedEngine
from kvgate.lab.tiny_gguf import write_tiny_gguf
from kvgate.wire.engines.finding import found_in
from kvgate.wire.engines.found import Given, Page

LMDEPLOY = pages({"/v1/models": model_list("lmdeploy", "m"), "/metrics": ""})
TENSORRT = pages({"/v1/models": model_list("tensorrt_llm", "m"), "/version": {"version": "1.4.0"}})
STRANGER = pages({"/v1/models": model_list("somebody", "m")})
FIGURES = ("--total-blocks", "500", "--block-size", "32", "--context", "4096")
GIVEN = Given(total_blocks=500, block_size=32, context=4096)
HYBRID = {
    "model_type": "gpt_oss", "num_hidden_layers": 24, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "hidden_size": 2880, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131_072,
}  # fmt: skip
HYBRID_LABELS = {
    "block_size": "16",
    "num_gpu_blocks": "21845",
    "kv_cache_size_tokens": "310381",
    "kv_cache_max_concurrency": "2.368",
}


def run(url: str, *options: str, key: str = "", config: Any = None) -> Result:
    given = ["--model-config", "-"] if config is not None else []
    arguments = ["--upstream", url, *given, *options]
    return CliRunner().invoke(
        plan, arguments, env={"KVGATE_API_KEY": key}, input=json.dumps(config), catch_exceptions=False
    )


def figures(url: str, *options: str, **more: Any) -> dict[str, Any]:
    result = run(url, "--json", *options, **more)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_variable_that_can_hold_no_key_is_an_error_that_does_not_quote_it() -> None:
    with site(vllm()) as url:
        for command, arguments in ((plan, ["--upstream", url]), (doctor, [url])):
            result = CliRunner().invoke(command, arguments, env={"KVGATE_API_KEY": "schl\u00fcssel\r\nx: 1"})
            assert result.exit_code == 2, result.output
            assert "the variable KVGATE_API_KEY: an API key is one word" in " ".join(result.output.split())
            assert "ssel" not in result.output


def admitted(engine: str, served: Mapping[str, Page], shape: tuple[int, int | None], given: Given) -> int:
    """How many of a shape a gate lets in that was given what `kvgate serve` finds."""
    facts = found_in(engine, served, given).facts
    assert facts is not None
    gate, count = Gate(facts), 0
    while isinstance(gate.ask(Ask((shape[0],), shape[1]), 0.0), Granted):
        count += 1
    return count


@pytest.mark.parametrize(
    ("engine", "served", "options", "given"),
    [
        ("vllm", vllm(), (), Given()),
        ("sglang", sglang(), (), Given()),
        ("llamacpp", llamacpp(8192), (), Given()),
        ("llamacpp", llamacpp(8192), ("--total-blocks", "32768"), Given(total_blocks=32_768)),
        ("tgi", tgi(), (), Given()),
        (
            "tgi",
            tgi(),
            ("--block-size", "16", "--total-blocks", "4095"),
            Given(block_size=16, total_blocks=4095),
        ),
        ("ollama", ollama(4096), ("--max-seqs", "4"), Given(max_seqs=4)),
        ("lmdeploy", LMDEPLOY, FIGURES, GIVEN),
        ("tensorrt-llm", TENSORRT, FIGURES, GIVEN),
        ("generic", STRANGER, ("--engine", "generic", *FIGURES), GIVEN),
    ],
)
def test_every_engine_is_planned_as_the_gate_will_admit(
    engine: str, served: Mapping[str, Page], options: tuple[str, ...], given: Given
) -> None:
    shapes: tuple[tuple[int, int | None], ...] = ((700, 300), (100, None), (2000, 1000))
    asked = [word for p, c in shapes for word in ("--shape", f"{p}:{'unset' if c is None else c}")]
    with site(served) as url:
        shown = figures(url, *options, *asked)

    assert (shown["engine"], shown["unknown"]) == (engine, [])
    for row, shape in zip(shown["shapes"], shapes, strict=True):
        assert row["concurrent"] == admitted(engine, served, shape, given) > 0, shape
    for row in shown["safety_fractions"]:
        shape = row["prompt_tokens"], row["output_cap"]
        at = Given(**{n: getattr(given, n) for n in ("total_blocks", "block_size", "context", "max_seqs")},
                   safety_fraction=row["safety_fraction"])  # fmt: skip
        assert row["concurrent"] == admitted(engine, served, shape, at), row
    assert shown["sources"]["total_blocks"]
    assert shown["cannot_know"]


@pytest.mark.parametrize(
    ("served", "options", "known", "missing"),
    [
        (TENSORRT, (), "tensorrt-llm", ("--total-blocks", "--block-size", "--context")),
        (LMDEPLOY, (), "lmdeploy", ("--total-blocks", "--context")),
        (STRANGER, (), "generic", ("--engine NAME", "--total-blocks")),
        (tgi("nothing"), (), "4,096", ("--total-blocks",)),
        (ollama(), (), "ollama", ("--context",)),
        (vllm(HYBRID_LABELS, context=131_072), (), "131,072", ("--model-config FILE",)),
    ],
)
def test_what_is_known_is_printed_and_what_is_missing_is_named_with_status_2(
    served: Mapping[str, Page], options: tuple[str, ...], known: str, missing: tuple[str, ...]
) -> None:
    with site(served) as url:
        result = run(url, *options)
        plain = json.loads(run(url, "--json", *options).stdout)

    assert result.exit_code == 2
    assert known in result.stdout
    assert "unknown" in result.stdout
    for option in missing:
        assert option in result.stdout
        assert any(option in line for line in plain["unknown"])
    assert "shapes" not in plain


def test_a_hybrid_is_planned_with_its_configuration_and_its_bytes_beside() -> None:
    with site(vllm(HYBRID_LABELS, context=131_072)) as url:
        shown = figures(url, "--shape", "4000:1000", config=HYBRID)

    assert (len(shown["groups"]), shown["full_attention_bytes_per_token"]) == (2, 24_576)
    given = Given(model_config=HYBRID)
    served = vllm(HYBRID_LABELS, context=131_072)
    assert shown["shapes"][0]["concurrent"] == admitted("vllm", served, (4000, 1000), given)


def test_an_engines_drafts_and_ranks_are_in_the_figures() -> None:
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    more = "\n".join(f'{name}{{engine="0",position="{i}"}} 0.0' for i in range(3))
    both = {"num_gpu_blocks": "128"}
    with site(vllm(both, both, more=more)) as url:
        shown = figures(url)
        text = run(url).stdout

    assert (shown["lookahead"], shown["ranks"], shown["total_blocks"]) == (10, 2, 63)
    assert "of one rank" in text


def test_a_guarded_engine_is_planned_with_its_key_and_asks_for_it_without() -> None:
    with site(sglang(), key="s3cret") as url:
        shown, without = run(url, key="s3cret"), run(url)

    assert shown.exit_code == 0
    assert "1,024" in shown.stdout
    assert without.exit_code == 2
    assert "asks for an API key" in without.stdout
    assert "--api-key-env NAME" in without.stdout
    assert "s3cret" not in shown.output + without.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give --model-config FILE, or --upstream URL"),
        (("--total-blocks", "5", "--max-seqs", "3"), "--total-blocks, --max-seqs: only with --upstream"),
        (("--upstream", "http://127.0.0.1:9", "--gpu-memory", "80GiB"), "--gpu-memory and --upstream"),
        (("--upstream", "http://127.0.0.1:9/v1"), "without /v1"),
    ],
)
def test_options_that_do_not_go_together_are_told(arguments: tuple[str, ...], says: str) -> None:
    result = CliRunner().invoke(plan, arguments)

    assert result.exit_code == 2
    assert says in " ".join(result.output.split())


def test_an_engine_that_does_not_answer_is_an_error_without_a_traceback() -> None:
    result = run("http://127.0.0.1:9")

    assert result.exit_code == 1
    assert "does not answer" in result.output


def test_a_prompt_that_fills_the_context_is_a_mistake_of_the_user() -> None:
    with site(vllm()) as url:
        result = run(url, "--shape", "4096:1")

    assert result.exit_code == 2
    assert "fills the context of 4,096" in result.output


# --- the real one


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module", params=[True, False], ids=["unified", "split"])
def real(request: pytest.FixtureRequest, model: Path) -> Iterator[tuple[bool, str]]:
    with EmbeddedEngine.start(cells=2048, slots=4, unified=request.param, model=model) as running:
        yield request.param, running.url


def test_a_real_llama_cpp_is_planned_both_ways_until_its_size_is_given(real: tuple[bool, str]) -> None:
    is_unified, url = real
    shapes = ("--shape", "100:100", "--shape", "100:unset")
    shown, given = figures(url, *shapes), figures(url, *shapes, "--total-blocks", "2048")
    slot = 2048 if is_unified else 512

    assert (shown["total_blocks"], shown["max_seqs"], shown["context"]) == (slot, 4, int(slot * 0.9))
    assert shown["if_split"]["total_blocks"] == 4 * slot
    # 199 cells each; what is priced for a split cache is no fewer.
    assert [row["concurrent"] for row in shown["shapes"]] == [min(4, int(slot * 0.9) // 199), 1]
    assert [row["concurrent"] for row in shown["if_split"]["shapes"]] == [4, 3]
    assert "if_split" not in given
    assert given["total_blocks"] == 2048
    text = run(url, *shapes).stdout
    assert f"The same if the cache is split: {4 * slot:,} cells" in text
    assert "unified_or_split" in text
    assert "all sequences" in text


def test_a_chart_of_an_engine_that_runs_is_drawn(model: Path, tmp_path: Path) -> None:
    with EmbeddedEngine.start(cells=512, slots=2, model=model) as running:
        result = run(running.url, "--plot", str(tmp_path / "plan.svg"))

    assert result.exit_code == 0, result.output
    assert "512 blocks, context 460" in (tmp_path / "plan.svg").read_text()
