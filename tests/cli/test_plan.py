"""`kvgate plan`: the figures, the tables, the chart, and what it says where it cannot tell."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvgate.cli.plan import plan

GEMMA = {
    "model_type": "gemma4",
    "text_config": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_size": 2816,
        "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
        "max_position_embeddings": 262144,
    },
}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
}


def run(config: Any, *arguments: str) -> Result:
    text = config if isinstance(config, str) else json.dumps(config)
    return CliRunner().invoke(plan, ["--model-config", "-", *arguments], input=text)


def figures(config: Any, *arguments: str) -> dict[str, Any]:
    result = run(config, "--json", *arguments)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_bytes_are_printed_without_any_hardware() -> None:
    found = figures(GEMMA)
    assert found["full_attention_bytes_per_token"] == 20480
    assert found["sliding_bytes_per_token"] == 204800
    assert found["state_bytes_per_sequence"] == 0
    assert "total_blocks" not in found


def test_a_config_is_read_from_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    result = CliRunner().invoke(plan, ["--model-config", str(path), "--json"])
    assert json.loads(result.stdout)["full_attention_bytes_per_token"] == 131072


def test_tensor_parallelism_and_the_cache_type_divide_the_bytes_of_a_gpu() -> None:
    assert figures(LLAMA, "--tp", "2", "--kv-dtype", "fp8")["full_attention_bytes_per_token"] == 32768


def test_memory_becomes_blocks_and_blocks_requests() -> None:
    found = figures(LLAMA, "--gpu-memory", "24GiB", "--weights-gib", "15", "--shape", "1000:500")
    # 24 x 0.9 - 15 = 6.6 GiB, in blocks of 2 MiB; one is the engine's null block.
    assert found["total_blocks"] == int(6.6 * 1024 / 2) - 1
    assert found["usable_blocks"] == int(found["total_blocks"] * 0.9)
    (shape,) = found["shapes"]
    assert (shape["blocks"], shape["concurrent"]) == (94, found["usable_blocks"] // 94)


def test_an_unset_cap_is_the_rest_of_the_context_and_lets_the_fewest_in() -> None:
    found = figures(LLAMA, "--gpu-memory", "24GiB", "--shape", "1000:unset", "--context", "4096")
    assert found["shapes"][0]["output_cap"] == 3096
    counts = [row["concurrent"] for row in found["caps"]]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == found["shapes"][0]["concurrent"] < counts[0]


def test_the_effect_of_the_safety_fraction_is_shown_with_the_chosen_one_among_them() -> None:
    found = figures(LLAMA, "--gpu-memory", "24GiB", "--shape", "1000:500", "--safety-fraction", "0.95")
    assert [row["safety_fraction"] for row in found["safety_fractions"]] == [0.8, 0.9, 0.95, 1.0]
    counts = [row["concurrent"] for row in found["safety_fractions"]]
    assert counts == sorted(counts)


def test_tokens_in_flight_are_kept_back_once_where_that_holds_more() -> None:
    options = ("--gpu-memory", "80GiB", "--weights-gib", "50")
    assert figures(GEMMA, *options, "--shape", "8000:500")["reserve_blocks"] == 5 * 3 * 8192 // 16
    assert figures(GEMMA, *options, "--shape", "100:50")["reserve_blocks"] == 0


def test_the_tables_name_what_they_show() -> None:
    result = run(GEMMA, "--gpu-memory", "80GiB", "--weights-gib", "50", "--shape", "8000:unset")
    assert result.exit_code == 0, result.output
    for words in ("sliding window or chunk", "204,800", "unset = 254,144", "safety fraction", "concurrent"):
        assert words in result.output


def test_without_hardware_the_tables_say_what_to_add() -> None:
    assert "--gpu-memory" in run(LLAMA).output


def test_what_the_figures_leave_out_is_said() -> None:
    sparse = LLAMA | {"model_type": "minimax_m3", "sparse_attention_config": {"sparse_block_size": 128}}
    assert "lower bound" in run(sparse).output


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ("{", (), "not JSON"),
        ("[]", (), "no JSON object"),
        ({"model_type": "brand_new"}, (), "[pool]"),
        (LLAMA, ("--gpu-memory", "12GiB", "--weights-gib", "15"), "no memory is left"),
        (LLAMA, ("--gpu-memory", "8 parsecs"), "80GiB"),
        (LLAMA, ("--gpu-memory", "0"), "80GiB"),
        (LLAMA, ("--gpu-memory", "1MiB"), "two blocks"),
        (LLAMA, ("--shape", "many"), "PROMPT:CAP"),
        (LLAMA, ("--shape", "5:0"), "PROMPT:CAP"),
        (LLAMA, ("--gpu-memory", "24GiB", "--shape", "8192:1"), "fills the context"),
        (LLAMA, ("--plot", "x.png"), "--gpu-memory"),
        ({**LLAMA, "max_position_embeddings": None}, ("--gpu-memory", "24GiB"), "--context"),
        (LLAMA, ("--kv-dtype", "fp8_ds_mla"), "MLA"),
    ],
)
def test_a_mistake_is_told_with_its_fix(config: Any, arguments: tuple[str, ...], message: str) -> None:
    result = run(config, *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvgate.cli.plan_chart", None)
    result = run(LLAMA, "--gpu-memory", "24GiB", "--plot", "x.png")
    assert result.exit_code == 1
    assert "kvgate[plot]" in result.output


def test_the_chart_is_written_in_the_format_of_its_name(tmp_path: Path) -> None:
    picture, drawing = tmp_path / "plan.png", tmp_path / "plan.svg"
    for path in (picture, drawing):
        result = run(LLAMA, "--gpu-memory", "24GiB", "--shape", "1000:500", "--plot", str(path))
        assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in drawing.read_text()


def test_a_chart_that_cannot_be_written_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    for path in (tmp_path / "missing" / "plan.png", tmp_path / "plan.nonsense"):
        result = run(LLAMA, "--gpu-memory", "24GiB", "--plot", str(path))
        assert result.exit_code == 1
        assert "could not be written" in result.output
