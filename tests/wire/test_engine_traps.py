"""The traps of engines' own figures, by the names they have in docs/engines.md: V counts too low, W too
high. Those of the price itself (V3 to V8, V11, V12, W1 to W3, W5, W6) are in tests/core."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_pages import llamacpp, model_list, pages, sglang, tgi, vllm, vllm_metrics
from kvgate.core.correction import Correction, Look
from kvgate.core.geometry import Serving
from kvgate.core.price import price
from kvgate.core.records import Ask, CapRules, PoolFacts, Price
from kvgate.wire.body import BadBody
from kvgate.wire.dialects.shape import enforce
from kvgate.wire.engines.finding import found_in
from kvgate.wire.engines.found import Found, Given, Level, Page
from kvgate.wire.engines.known import ENGINES
from kvgate.wire.engines.sights import sight_in

GPT_OSS = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2880,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131_072,
}
# 8 GiB, as vLLM printed it for gpt-oss-20b at a context of 131,072.
GPT_OSS_LABELS = {
    "block_size": "16",
    "num_gpu_blocks": "21845",
    "kv_cache_size_tokens": "310381",
    "kv_cache_max_concurrency": "2.368",
}


def codes(found: Found) -> set[str]:
    return {finding.code for finding in found.warnings}


def facts(found: Found) -> PoolFacts:
    assert found.facts is not None, found.unknown
    return found.facts


def test_v1_num_gpu_blocks_is_a_sum_repeated_on_each_engines_label() -> None:
    labels = {"num_gpu_blocks": "256"}
    found = found_in("vllm", vllm(*[labels] * 4))

    assert (found.ranks, facts(found).total_blocks) == (4, 256 // 4 - 1)
    assert not found.is_exact  # of four that share a sum one may have less
    assert "several_ranks" in codes(found)


def test_v2_the_null_block_of_each_rank_is_not_capacity() -> None:
    found = found_in("vllm", vllm())

    assert facts(found).total_blocks * facts(found).block_size == 8_064  # 8,192 is printed


def test_v3_the_token_figure_of_a_hybrid_is_no_capacity_and_its_configuration_is_asked_for() -> None:
    found = found_in("vllm", vllm(GPT_OSS_LABELS, context=131_072))

    assert (found.facts, found.missing) == (None, ("model_config",))
    assert "--model-config FILE" in found.unknown[0]
    assert found.context == 131_072


def test_v3_with_its_configuration_a_hybrid_is_priced_in_blocks_of_both_groups() -> None:
    given = Given(model_config=GPT_OSS)
    found = found_in("vllm", vllm(GPT_OSS_LABELS, context=131_072), given)
    priced = price(Ask((100,), 50), facts(found))

    assert isinstance(priced, Price)
    assert 19 <= priced.blocks <= 23  # 19 were measured; the token figure says 11
    assert len(facts(found).geometry.groups) == 2  # type: ignore[union-attr]
    assert found.is_exact


def test_v3_a_configuration_of_another_model_is_noticed() -> None:
    small = GPT_OSS | {"layer_types": ["full_attention"] * 24, "sliding_window": None}
    labels = GPT_OSS_LABELS | {"kv_cache_max_concurrency": "1.2"}
    found = found_in("vllm", vllm(labels, context=131_072), Given(model_config=small))

    assert (found.facts, found.missing) == (None, ("model_config",))
    assert "by the engine's own word" in found.unknown[0]
    assert not found.is_exact


def test_v3_a_gemma_whose_token_figure_is_above_the_plain_one_is_a_hybrid_all_the_same() -> None:
    labels = {"block_size": "16", "num_gpu_blocks": "26214", "kv_cache_size_tokens": "503911"}

    assert found_in("vllm", vllm(labels, context=262_144)).missing == ("model_config",)


def test_v3_a_state_model_whose_token_figure_is_off_by_a_few_is_a_hybrid() -> None:
    # One attention group and three of states: 8,195 blocks at the longest instead of 8,192.
    labels = {"block_size": "16", "num_gpu_blocks": "10000", "kv_cache_size_tokens": "159941"}
    plain = labels | {"kv_cache_size_tokens": "160000"}

    assert found_in("vllm", vllm(labels, context=131_072)).missing == ("model_config",)
    assert found_in("vllm", vllm(plain, context=131_072)).missing == ()


def test_v3_a_context_that_fills_no_whole_block_is_not_taken_for_a_hybrid() -> None:
    labels = {"block_size": "16", "num_gpu_blocks": "1000", "kv_cache_size_tokens": str(1000 * 1000 // 63)}

    assert facts(found_in("vllm", vllm(labels, context=1000))).total_blocks == 999


def test_v3_an_older_page_without_the_token_figure_leaves_it_open_and_asks() -> None:
    found = found_in("vllm", vllm({"kv_cache_size_tokens": "None"}))

    assert found.missing == ("model_config",)
    assert "one KV group or several" in found.unknown[0]


def test_v7_speculative_tokens_are_read_from_the_positions_that_are_counted() -> None:
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    more = "\n".join(f'{name}{{engine="0",position="{i}"}} 0.0' for i in range(3))

    # k + 1 slots of the drafter, and the drafts of two steps in flight.
    assert facts(found_in("vllm", vllm(more=more))).lookahead == 4 + 2 * 3


def test_v10_counting_is_left_to_the_engine_that_renders() -> None:
    for name in ("vllm", "llamacpp", "tgi"):
        assert ENGINES[name].count_chat is not None
    said = " ".join(ENGINES["vllm"].cannot_know)
    assert "previous_response_id" in said


def test_v13_a_generation_that_outlives_its_client_is_not_let_through() -> None:
    assert b"x-conversation-id" in ENGINES["llamacpp"].drop_headers


def test_v14_several_api_server_processes_are_noticed() -> None:
    assert "several_api_servers" in codes(found_in("vllm", vllm(one_process=False)))
    assert "several_api_servers" not in codes(found_in("vllm", vllm()))


def test_v15_the_engine_lets_go_later_than_its_connection_and_each_engine_says_when() -> None:
    assert all(engine.abort_grace > 0 for engine in ENGINES.values())
    # A client that has left is looked for every 4 s.
    assert ENGINES["sglang"].abort_grace > 4


def test_w4_shared_prefixes_are_charged_to_each_request_and_that_is_said() -> None:
    assert "prefix_caching" in codes(found_in("vllm", vllm()))
    assert "prefix_caching" not in codes(found_in("vllm", vllm({"enable_prefix_caching": "False"})))


def test_w7_use_is_what_the_engine_calls_use_and_cached_blocks_are_free() -> None:
    pool = facts(found_in("vllm", vllm()))

    assert sight_in("vllm", vllm(), pool).used_blocks == round(0.25 * 63)


def test_w8_a_cap_of_the_servers_own_can_only_be_lower_and_that_is_said() -> None:
    assert any("generation_config" in what and "lower" in what for what in ENGINES["vllm"].cannot_know)


def test_the_pages_of_an_adapter_do_not_shorten_the_context() -> None:
    models = model_list("vllm", "base", max_model_len=4096, parent=None)
    models["data"].append({"id": "lora", "owned_by": "vllm", "parent": "base", "max_model_len": None})
    found = found_in("vllm", vllm() | pages({"/v1/models": models}))

    assert (found.context, found.models) == (4096, ("base", "lora"))


@pytest.mark.parametrize("blocks", ["None", "", "0", "-3", "1", "nan", "1e400", "64.5", "many"])
def test_blocks_that_are_no_number_are_asked_for(blocks: str) -> None:
    found = found_in("vllm", vllm({"num_gpu_blocks": blocks}))

    assert found.facts is None
    assert "total_blocks" in found.missing
    assert "--total-blocks N" in found.unknown[0]


def test_engines_that_contradict_each_other_give_the_least_that_they_can_mean() -> None:
    found = found_in("vllm", vllm({"num_gpu_blocks": "100"}, {"num_gpu_blocks": "60"}))

    assert found.is_doubtful
    assert not found.is_exact
    assert "capacity_contradicts" in codes(found)
    assert found_in(
        "vllm",
        vllm({"num_gpu_blocks": "100"}, {"num_gpu_blocks": "60"}),
        Given(total_blocks=9, block_size=128, context=4096),
    ).facts == PoolFacts(9, 128, 4096, engine="vllm", engine_context=4096)


def test_block_sizes_that_differ_are_asked_for() -> None:
    found = found_in("vllm", vllm({"block_size": "16"}, {"block_size": "32"}))

    assert found.missing == ("block_size",)


def test_the_operators_figures_win_and_a_pool_larger_than_the_engines_is_unsafe() -> None:
    found = found_in("vllm", vllm(), Given(total_blocks=64))

    assert facts(found).total_blocks == 64
    assert [f.level for f in found.warnings if f.code == "capacity_above_engine"] == [Level.UNSAFE]
    assert not found.is_exact
    assert "capacity_above_engine" not in codes(found_in("vllm", vllm(), Given(total_blocks=63)))
    assert "block_size_below_engine" in codes(found_in("vllm", vllm(), Given(block_size=16)))


def test_a_hybrid_with_all_figures_given_but_no_configuration_is_named_unsafe() -> None:
    given = Given(total_blocks=21_844, block_size=16, context=131_072)
    found = found_in("vllm", vllm(GPT_OSS_LABELS, context=131_072), given)

    assert facts(found).geometry is None
    assert "hybrid_unpriced" in codes(found)


def test_a_configuration_that_cannot_be_priced_says_what_is_missing() -> None:
    found = found_in("vllm", vllm(), Given(model_config={"model_type": "brand_new"}))

    assert found.facts is None
    assert "brand_new" in found.unknown[0]


def test_preemptions_so_far_are_shown() -> None:
    counter = 'vllm:num_preemptions_total{engine="0",model_name="tiny"} '
    text = vllm_metrics().replace(f"{counter}0.0", f"{counter}31.0")
    found = found_in("vllm", vllm() | pages({"/metrics": text}))

    assert found.preemptions == 31
    assert "preempted" in codes(found)


def test_sglang_counts_one_rank_in_pages_and_takes_nothing_off() -> None:
    found = found_in("sglang", sglang())

    assert (facts(found).total_blocks, facts(found).block_size, found.ranks) == (1024, 64, 2)
    assert (facts(found).context, facts(found).max_seqs, facts(found).lookahead) == (32_768, 256, 1)
    assert (found.running, found.waiting, found.preemptions) == (4, 2, 3)
    assert found.is_exact


def test_sglangs_second_pool_binds_where_it_is_smaller() -> None:
    rank = {"memory_usage": {"token_capacity": 65_536, "token_capacity_swa": 52_416}}
    found = found_in("sglang", sglang(internal_states=[rank, rank]))

    assert facts(found).total_blocks == 52_416 // 64
    assert "two_pools" in codes(found)
    assert not found.is_exact


def test_sglangs_ranks_of_different_size_give_the_smallest() -> None:
    ranks = [{"memory_usage": {"token_capacity": n}} for n in (65_536, 60_000)]
    found = found_in("sglang", sglang(internal_states=ranks))

    assert facts(found).total_blocks == 60_000 // 64
    assert found.is_doubtful


def test_sglangs_draft_tokens_are_reserved_for_each_running_request() -> None:
    drafts = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_eagle_topk": 4}
    found = found_in("sglang", sglang(**drafts, speculative_num_draft_tokens=16))

    assert facts(found).lookahead == 2 * max(4 * 3, 16) + 1


def test_sglangs_context_may_stand_in_its_list_of_models_only_and_never_comes_from_its_tokenizer() -> None:
    found = found_in(
        "sglang", sglang(context_length=None) | {"/tokenize": Page(200, '{"max_model_len": 999999}')}
    )
    nowhere = found_in("sglang", sglang(context_length=None) | {"/v1/models": Page(404)})

    assert found.context == 32_768
    assert nowhere.missing == ("context",)


def test_an_older_sglang_is_read_from_its_older_page() -> None:
    old = sglang(internal_states=[{"last_gen_throughput": 1.0}], max_running_requests=48)
    moved = {
        "/server_info": Page(404),
        "/get_server_info": old["/server_info"],
        "/v1/models": old["/v1/models"],
    }
    found = found_in("sglang", moved)

    assert (facts(found).total_blocks, facts(found).max_seqs) == (1024, 48)
    assert found.preemptions is None


def test_sglangs_capacity_in_two_places_is_the_lesser_where_they_differ() -> None:
    loads = {"loads": [{"dp_rank": 0, "max_total_num_tokens": 64_000, "num_running_reqs": 7}]}
    found = found_in("sglang", sglang() | pages({"/v1/loads": loads}))

    assert facts(found).total_blocks == 1000
    assert found.running == 7
    assert "capacity_contradicts" in codes(found)


def test_llama_cpps_one_figure_with_two_meanings_gives_the_lesser_and_asks() -> None:
    found = found_in("llamacpp", llamacpp())

    assert facts(found) == PoolFacts(2048, 1, 1843, max_seqs=4, engine="llamacpp", engine_context=2048)
    (asked,) = [f for f in found.warnings if f.code == "unified_or_split"]
    assert "--total-blocks N" in asked.fix
    assert not found.is_exact


def test_llama_cpp_with_its_size_given_is_told_what_that_means() -> None:
    unified = found_in("llamacpp", llamacpp(), Given(total_blocks=2048))
    split = found_in("llamacpp", llamacpp(512), Given(total_blocks=2048))
    too_many = found_in("llamacpp", llamacpp(512), Given(total_blocks=4096))

    assert facts(split).total_blocks == 2048
    assert "unified_cache" in codes(unified)
    assert codes(split) & {"unified_cache", "unified_or_split", "cells_above_slots"} == set()
    assert "cells_above_slots" in codes(too_many)


def test_llama_cpp_with_one_slot_has_nothing_to_ask() -> None:
    found = found_in("llamacpp", llamacpp(slots=1))

    assert (codes(found), found.is_exact) == ({"context_lowered"}, True)


def test_llama_cpp_whose_slots_page_is_switched_off_is_read_from_the_other() -> None:
    found = found_in("llamacpp", llamacpp() | {"/slots": Page(501, '{"error":{}}')})

    assert facts(found).max_seqs == 4
    assert found.running is None


def test_llama_cpp_that_drafts_has_cells_that_no_page_tells() -> None:
    slots = [{"id": 0, "n_ctx": 2048, "speculative": True, "is_processing": True}]
    found = found_in("llamacpp", llamacpp(slots=1) | pages({"/slots": slots}))

    assert "speculation_unknown" in codes(found)
    assert found.running == 1


def test_tgis_budget_is_a_gauge_and_its_block_is_bounded() -> None:
    found = found_in("tgi", tgi())

    assert (facts(found).total_blocks, facts(found).block_size) == (65_536 // 256 - 1, 256)
    assert (facts(found).context, facts(found).max_seqs, found.running) == (4096, 128, 3)
    assert "block_size_assumed" in codes(found)
    given = Given(block_size=16, total_blocks=4095)
    assert "block_size_assumed" not in codes(found_in("tgi", tgi(), given))


@pytest.mark.parametrize("budget", ["", "tgi_batch_max_total_tokens 0", "tgi_batch_max_total_tokens NaN"])
def test_tgi_before_its_warm_up_is_asked_about(budget: str) -> None:
    assert found_in("tgi", tgi(budget)).missing[0] == "total_blocks"


def test_tgis_old_figure_and_its_gauge_that_differ_give_the_lesser() -> None:
    found = found_in("tgi", tgi(max_batch_total_tokens=32_768))

    assert facts(found).total_blocks == 127
    assert found.is_doubtful


def test_every_engine_that_tells_nothing_says_which_option_gives_it() -> None:
    for name in ("tensorrt-llm", "lmdeploy", "generic", "vllm", "sglang", "llamacpp", "tgi"):
        found = found_in(name, {})
        assert found.facts is None
        assert found.unknown
        assert all("--" in line for line in found.unknown), name
        given = found_in(name, {}, Given(total_blocks=100, block_size=16, context=512))
        ahead = facts(given).lookahead
        assert facts(given) == PoolFacts(100, 16, 512, engine=name, lookahead=ahead), name


def test_a_fraction_of_the_operators_is_kept() -> None:
    assert facts(found_in("vllm", vllm(), Given(safety_fraction=0.5))).usable_blocks == 31


def test_a_pool_too_small_to_reserve_anything_is_said() -> None:
    found = found_in("generic", {}, Given(total_blocks=1, block_size=16, context=512, safety_fraction=0.5))

    assert found.facts is None
    assert "leave none" in found.unknown[0]


def test_a_context_that_can_never_be_reserved_is_lowered_to_what_can_unless_it_was_given() -> None:
    small = vllm({"num_gpu_blocks": "20", "kv_cache_size_tokens": "2560"})
    found = found_in("vllm", small)
    asked = Ask((1,), None)

    assert (facts(found).context, codes(found) & {"context_lowered"}) == (17 * 128, {"context_lowered"})
    assert isinstance(price(asked, facts(found)), Price)
    given = found_in("vllm", small, Given(context=4096))
    assert "context_above_pool" in codes(given)
    assert not isinstance(price(asked, facts(given)), Price)


def test_a_hybrids_options_change_its_price() -> None:
    pages_ = vllm(GPT_OSS_LABELS, context=131_072)
    small = found_in("vllm", pages_, Given(model_config=GPT_OSS, serving=Serving(max_batched_tokens=8192)))
    large = found_in("vllm", pages_, Given(model_config=GPT_OSS, serving=Serving(max_batched_tokens=32_768)))

    def blocks(found: Found) -> int:
        each = replace(facts(found), geometry=facts(found).geometry)
        priced = price(Ask((60_000,), 1000), replace(each, safety_fraction=1.0))
        assert isinstance(priced, Price)
        assert each.geometry is not None
        return priced.blocks + each.geometry.reserve_blocks

    assert blocks(small) < blocks(large)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 5}}),
    ],
)
def test_v13_a_prefill_whose_cache_waits_for_another_engine_is_not_taken(
    path: str, body: dict[str, Any]
) -> None:
    read = ENGINES["vllm"].routes[path.encode()].read
    with pytest.raises(BadBody, match="keep the memory after its answer") as caught:
        read(json.dumps(body | {"kv_transfer_params": {"do_remote_decode": True}}).encode())
    assert caught.value.param == "kv_transfer_params"
    read(json.dumps(body | {"kv_transfer_params": {"do_remote_prefill": True}}).encode())
    read(json.dumps(body | {"kv_transfer_params": None}).encode())


def test_v13_a_resumable_stream_has_no_path() -> None:
    for engine in ENGINES.values():
        taken = {*engine.routes, *engine.free_posts}
        assert not any(b"realtime" in path or b"resum" in path for path in taken), engine.name


def test_v13_tool_loops_of_the_engine_are_priced_as_a_whole_context() -> None:
    read = ENGINES["vllm"].routes[b"/v1/responses"].read
    own = read(json.dumps({"input": "x", "tools": [{"type": "code_interpreter"}]}).encode())
    theirs = read(json.dumps({"input": "x", "tools": [{"type": "function", "name": "f"}]}).encode())

    assert own.priced_as_whole_context
    assert not theirs.priced_as_whole_context


def test_v9_a_chat_and_a_completion_without_a_cap_are_told_apart() -> None:
    routes = ENGINES["vllm"].routes
    chat = routes[b"/v1/chat/completions"].read(b'{"messages": [{"role": "user", "content": "x"}]}')
    completion = routes[b"/v1/completions"].read(b'{"prompt": "x"}')

    assert (chat.effective_cap, completion.effective_cap) == (None, 16)
    pool = facts(found_in("vllm", vllm()))
    caps = [
        price(Ask((96,), s.output_cap, rules=CapRules(s.default_cap)), replace(pool, safety_fraction=1.0))
        for s in (chat, completion)
    ]
    assert [each.output_cap for each in caps if isinstance(each, Price)] == [4000, 16]


def test_w8_the_cap_that_is_priced_is_the_one_that_is_sent_so_a_lower_one_of_the_server_only_frees() -> None:
    shape = (
        ENGINES["vllm"]
        .routes[b"/v1/chat/completions"]
        .read(b'{"messages": [{"role": "user", "content": "x"}]}')
    )

    assert json.loads(enforce(shape, 4000))["max_tokens"] == 4000


def test_w4_every_choice_is_charged_its_own_prompt() -> None:
    pool = PoolFacts(1000, 16, 4096)
    one, four = price(Ask((1600,), 16), pool), price(Ask((1600,), 16, choices=4), pool)

    assert isinstance(one, Price)
    assert isinstance(four, Price)
    assert four.blocks == 4 * one.blocks


def test_w7_cached_blocks_that_nobody_uses_are_neither_added_nor_taken_for_a_foreign_client() -> None:
    pool = facts(found_in("vllm", vllm()))
    cached = vllm(more="vllm:prefix_cache_queries_total 900.0\nvllm:prefix_cache_hits_total 800.0")

    assert sight_in("vllm", cached, pool) == sight_in("vllm", vllm(), pool)


def test_v14_what_passes_by_the_gate_is_held_back_for() -> None:
    seen = Correction(0.90)
    for n in range(2):
        seen.look(Look(n * 3.0, 10, 63, 30, 0, running=5, sent=1))

    assert (seen.foreign_seqs, seen.foreign_blocks) == (4, 24)
    assert seen.fraction == pytest.approx(0.90 - 24 / 63)


TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("trap", [*(f"v{n}" for n in range(1, 16)), *(f"w{n}" for n in range(1, 9))])
def test_every_trap_has_a_test_and_a_line_in_the_documents(trap: str) -> None:
    text = (TESTS.parent / "docs" / "engines.md").read_text("utf-8")
    row = re.search(rf"^\| {trap.upper()} \|.*\| `(test_[a-z0-9_]+)` \|$", text, re.M)
    assert row, trap
    assert re.search(rf"(^test|_){trap}_", row[1]), row[1]
    name = re.compile(rf"^(?:async )?def {row[1]}\(", re.M)
    assert any(name.search(file.read_text("utf-8")) for file in TESTS.rglob("test_*.py")), row[1]
