"""Pages of any kind, from any engine: what is read is right or unknown, and nothing is raised."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_pages import llamacpp, model_list, ollama, pages, sglang, tgi, vllm
from kvgate.core.records import PoolFacts
from kvgate.wire.engines.finding import found_in
from kvgate.wire.engines.found import Finding, Found, Given, Level, Page, refreshed
from kvgate.wire.engines.known import ENGINES
from kvgate.wire.engines.pages import samples, size, total, whole
from kvgate.wire.engines.readers import READERS, recognised
from kvgate.wire.engines.sights import LOOKS, Sight, sight_in

RECORDED = {"vllm": vllm(), "sglang": sglang(), "llamacpp": llamacpp(), "tgi": tgi(), "ollama": ollama(4096)}
POOL = PoolFacts(63, 128, 4096)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def test_every_engine_has_a_reader_and_says_what_it_does() -> None:
    assert set(READERS) == set(ENGINES)
    for engine in ENGINES.values():
        assert all((engine.capacity, engine.unit, engine.context, engine.cap_rules, engine.when_full))
        assert engine.cannot_know


@pytest.mark.parametrize("name", RECORDED)
def test_each_engine_is_told_by_its_own_pages(name: str) -> None:
    assert recognised(RECORDED[name]) == (name,)


@pytest.mark.parametrize(
    ("owner", "name"), [("tensorrt_llm", "tensorrt-llm"), ("lmdeploy", "lmdeploy"), ("vllm", "vllm")]
)
def test_an_engine_is_told_by_its_signature(owner: str, name: str) -> None:
    assert recognised(pages({"/v1/models": model_list(owner, "m")})) == (name,)


def test_pages_of_two_engines_at_one_address_are_not_guessed_about() -> None:
    both = llamacpp() | tgi()
    both["/v1/models"] = Page(200, json.dumps(model_list("somebody", "m")))

    assert recognised(both) == ("llamacpp", "tgi")
    assert recognised(pages({"/v1/models": model_list("openai", "m")})) == ()


def test_tensorrt_llms_metrics_are_never_asked_for() -> None:
    assert "/metrics" not in READERS["tensorrt-llm"].paths
    assert "tensorrt-llm" not in LOOKS


def test_ollama_is_slots_of_a_whole_context() -> None:
    found = found_in("ollama", ollama(4096), Given(max_seqs=4))
    assumed = found_in("ollama", ollama(4096))

    slots = PoolFacts(4, 4096, 4096, 4, safety_fraction=1.0, engine="ollama", engine_context=4096)
    assert found.facts == slots
    assert assumed.facts == replace(slots, total_blocks=1, max_seqs=1)
    assert [f.code for f in assumed.warnings] == ["slots_assumed"]


def test_ollama_without_a_loaded_model_has_no_context_to_tell() -> None:
    found = found_in("ollama", ollama())

    assert (found.facts, found.missing) == (None, ("total_blocks", "block_size", "context"))


def test_ollama_with_several_loaded_models_takes_the_least() -> None:
    found = found_in("ollama", ollama(4096, 2048))

    assert found.context == 2048
    assert found.is_doubtful


@pytest.mark.parametrize("name", RECORDED)
@given(data=st.data())
def test_no_page_however_spoilt_raises_or_makes_the_pool_larger(name: str, data: st.DataObject) -> None:
    whole_pages = RECORDED[name]
    path = data.draw(st.sampled_from(sorted(whole_pages)))
    text = whole_pages[path].text
    cut = data.draw(st.integers(0, len(text)))
    spoilt = data.draw(
        st.sampled_from(
            [Page(200, text[:cut]), Page(500, text), Page(0, "gone"), Page(200, "[]"), Page(200, "")]
        )
    )
    found = found_in(name, whole_pages | {path: spoilt})
    good = found_in(name, whole_pages).facts

    assert good is not None
    if found.facts is not None:
        assert found.facts.total_blocks <= good.total_blocks
        assert found.facts.block_size == good.block_size
    else:
        assert found.unknown


@given(
    st.sampled_from(sorted(READERS)),
    st.dictionaries(
        st.sampled_from(
            ["/v1/models", "/props", "/slots", "/server_info", "/info", "/api/ps", "/api/tags", "/v1/loads"]
        ),
        JSON,
    ),
)
def test_json_of_any_shape_is_read_without_an_error(name: str, texts: dict[str, Any]) -> None:
    made = {path: Page(200, json.dumps(value)) for path, value in texts.items()}

    found_in(name, made)
    recognised(made)
    for engine in LOOKS:
        sight_in(engine, made, POOL)


@given(st.sampled_from(["vllm", "sglang", "tgi", "lmdeploy"]), st.text())
def test_text_of_any_shape_is_read_without_an_error(name: str, text: str) -> None:
    found_in(name, {"/metrics": Page(200, text)})
    sight_in(name, {"/metrics": Page(200, text)}, POOL)


def test_labels_are_read_as_they_were_written() -> None:
    page = Page(200, 'a{x="1",y="say \\"}\\" \\\\ \\n"} 2 1700000000\nab 3\na 4\na{x="2"} NaN\n# a 5\na x\n')
    found = samples(page, "a")

    assert [s.value for s in found[:2]] == [2.0, 4.0]
    assert found[0].labels == {"x": "1", "y": 'say "}" \\ \n'}
    assert total(found) is None
    assert total(found[:2]) == 6
    assert total([]) is None


@pytest.mark.parametrize("value", [None, True, -1, 1.5, "x", "inf", float("nan"), [], 2**60])
def test_what_is_no_number_is_none(value: Any) -> None:
    assert whole(value) is None
    assert size(0) is None
    assert (whole("12.0"), whole(0), size("7")) == (12, 0, 7)


def seen(name: str, text: Any, facts: PoolFacts = POOL, **more: str) -> Sight:
    page = Page(200, text if isinstance(text, str) else json.dumps(text))
    return sight_in(name, {LOOKS[name]: page}, facts, **more)


def test_use_is_read_in_blocks_of_the_pool() -> None:
    assert seen("vllm", RECORDED["vllm"]["/metrics"].text) == Sight(16, 0, 0)
    assert seen("sglang", RECORDED["sglang"]["/metrics"].text, PoolFacts(1024, 64, 4096)) == Sight(100, 3, 4)
    assert seen("tgi", "tgi_batch_current_max_tokens 1000\ntgi_batch_current_size 2") == Sight(8, None, 2)
    assert seen("lmdeploy", "lmdeploy:gpu_cache_usage_perc 0.5") == Sight(32, None, None)


def test_a_rank_is_looked_at_by_its_label() -> None:
    two = vllm({}, {})["/metrics"].text.replace(
        'kv_cache_usage_perc{engine="1",model_name="tiny"} 0.25',
        'kv_cache_usage_perc{engine="1",model_name="tiny"} 0.75',
    )

    assert seen("vllm", two, rank="0").used_blocks == 16
    assert seen("vllm", two, rank="1").used_blocks == 47
    assert seen("vllm", two).used_blocks == 47


def test_slots_that_work_are_what_llama_cpp_uses() -> None:
    slots = [  # as a running one shows them: 22 of the 92 are already of the answer
        {"is_processing": True, "n_prompt_tokens": 92, "next_token": [{"n_remain": 1478, "n_decoded": 22}]},
        {"is_processing": True, "n_prompt_tokens": 15, "next_token": [{"n_remain": 3, "n_decoded": 5}]},
        {"is_processing": False, "n_prompt_tokens": 1569, "next_token": [{"n_remain": -1, "n_decoded": 0}]},
    ]
    assert seen("llamacpp", slots) == Sight(107, None, 2, (1570, 18))
    assert seen("llamacpp", [{"is_processing": True}]) == Sight(None, None, 1)
    slots[0]["next_token"] = [{"n_remain": -1}]  # no cap
    del slots[1]["next_token"]
    assert seen("llamacpp", slots) == Sight(107, None, 2, (92, 15))


@pytest.mark.parametrize("share", ["NaN", "-0.1", "1.5", "+Inf"])
def test_a_share_that_is_none_is_not_believed(share: str) -> None:
    assert seen("vllm", f"vllm:kv_cache_usage_perc {share}").is_blind


def found(facts: PoolFacts | None, *, doubts: bool = False) -> Found:
    return Found("vllm", facts, warnings=(Finding("x", Level.WARNING, "", doubts=doubts),))


def test_sizes_that_are_read_again_are_taken_over_and_the_fraction_is_kept() -> None:
    before = PoolFacts(100, 16, 2048, safety_fraction=0.7)

    assert refreshed(before, found(PoolFacts(200, 16, 4096))) == PoolFacts(200, 16, 4096, safety_fraction=0.7)
    assert refreshed(before, found(None)) == before


sizes = st.builds(
    PoolFacts,
    st.integers(1, 500),
    st.sampled_from([1, 16, 128]),
    st.integers(1, 9000),
    st.none() | st.integers(1, 64),
)


@given(sizes, sizes)
def test_a_doubtful_reading_never_raises_capacity(before: PoolFacts, new: PoolFacts) -> None:
    after = refreshed(before, found(new, doubts=True))

    assert after.total_blocks * after.block_size <= before.total_blocks * before.block_size
    assert after.context <= before.context
    assert before.max_seqs is None or (after.max_seqs is not None and after.max_seqs <= before.max_seqs)
    assert refreshed(before, found(new)) == replace(new, safety_fraction=before.safety_fraction)


DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_the_table_of_engines_says_what_the_code_says(name: str) -> None:
    text = (DOCS / "engines.md").read_text("utf-8")
    (row,) = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
    engine = ENGINES[name]

    for said in (engine.capacity, engine.unit, engine.context, engine.cap_rules, engine.when_full):
        assert f"| {said} |" in row
    assert f"| {engine.abort_grace:g} s |" in row
    assert all(what in text for what in engine.cannot_know)


def test_every_finding_is_documented() -> None:
    text = (DOCS / "doctor.md").read_text("utf-8")
    source = Path(__file__).parents[2] / "src" / "kvgate"
    places = [
        *source.glob("wire/engines/*.py"),
        source / "edge/upstreams/discovery.py",
        *source.glob("cli/doctor*.py"),
    ]
    call = re.compile(r'(?:\.(?:note|warn|unsafe)|Finding)\(\s*f?"([a-z_{}]+)"')
    codes = {code for place in places for code in call.findall(place.read_text("utf-8"))}

    assert len(codes) > 20
    for code in codes - {"{name}_below_engine"}:
        assert f"`{code}`" in text, code
