"""Every priced endpoint of every engine: what is read, and what is sent on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from bodies import CAP, cap_path, endpoints, generating, raw, sample, with_value
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvgate.wire.body import BadBody
from kvgate.wire.dialects.chats import media_in
from kvgate.wire.dialects.ollama import in_exact_letters
from kvgate.wire.dialects.shape import (
    Api,
    Conversation,
    Mixed,
    Part,
    RequestShape,
    StreamKind,
    Unseen,
    enforce,
    whole_context,
)
from kvgate.wire.engines.known import ENGINES
from kvgate.wire.routes import Route, is_free, route_for

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
# Names that some reader looks at, so that random bodies reach more than the first check.
NAMES = st.sampled_from(
    [
        "model",
        "messages",
        "prompt",
        "input",
        "inputs",
        "text",
        "input_ids",
        "token_ids",
        "system",
        "tools",
        "role",
        "content",
        "type",
        "stream",
        "n",
        "best_of",
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "n_predict",
        "sampling_params",
        "parameters",
        "options",
        "max_new_tokens",
        "num_predict",
        "num_ctx",
        "query",
        "queries",
        "documents",
        "texts",
        "instructions",
        "previous_response_id",
        "suffix",
        "input_prefix",
        "input_suffix",
        "input_extra",
        "filename",
        "images",
        "context",
        "kv_transfer_params",
    ]
)
NESTED = st.recursive(
    JSON, lambda inner: st.dictionaries(NAMES, inner, max_size=5) | st.lists(inner, max_size=3)
)
LIKELY = st.dictionaries(NAMES, NESTED, max_size=7)
ids = [f"{engine}{path}" for engine, path, _ in endpoints()]
generating_ids = [f"{engine}{path}" for engine, path, _ in generating()]
everywhere = pytest.mark.parametrize(("engine", "path", "route"), endpoints(), ids=ids)
where_generated = pytest.mark.parametrize(("engine", "path", "route"), generating(), ids=generating_ids)


def texts_of(part: Part) -> str:
    if isinstance(part, Conversation):
        return json.dumps([part.messages, part.tools])
    if isinstance(part, Mixed):
        return json.dumps(part.pieces)
    return json.dumps(part) if isinstance(part, str | list) else part.why


@everywhere
def test_a_request_has_a_price_that_is_not_nothing(engine: str, path: str, route: Route) -> None:
    shape = route.read(raw(sample(engine, path)))
    plan = ENGINES[engine].plan(shape)

    assert shape.parts
    assert shape.sequences >= len(shape.parts)
    assert plan.is_whole_context or len(plan.parts) == len(shape.parts)
    assert all(
        not isinstance(term, int) or term > 0 or len(terms) > 1 for terms in plan.parts for term in terms
    )


@everywhere
def test_the_prompt_is_among_what_is_counted(engine: str, path: str, route: Route) -> None:
    shape = route.read(raw(sample(engine, path)))

    assert all("PROMPT" in texts_of(part) or part == [1, 2, 3] for part in shape.parts)


@where_generated
def test_the_cap_is_read_and_a_smaller_one_is_written_in_its_place(
    engine: str, path: str, route: Route
) -> None:
    body = sample(engine, path)
    shape = route.read(raw(body))

    assert shape.output_cap == shape.effective_cap == CAP
    assert enforce(shape, CAP) == raw(body)
    sent = json.loads(enforce(shape, 7))
    assert ENGINES[engine].routes[path.encode()].read(raw(sent)).output_cap == 7
    assert sent == with_value(body, cap_path(engine, path), 7) | (
        {"max_tokens": 7} if path == "/v1/completions" else {}
    )


@where_generated
@pytest.mark.parametrize("unset", ["absent", None])
def test_an_unset_cap_is_written_in(engine: str, path: str, route: Route, unset: Any) -> None:
    body = sample(engine, path, None)
    if unset == "absent":
        body = json.loads(json.dumps(body))
        at, where = body, cap_path(engine, path)
        assert where is not None
        for step in where[:-1]:
            at = at[step]
        del at[where[-1]]
    if path == "/v1/messages" and engine != "llamacpp":
        with pytest.raises(BadBody, match="max_tokens"):
            route.read(raw(body))
        return
    shape = route.read(raw(body))

    assert shape.output_cap is None
    assert route.read(enforce(shape, 9)).output_cap == 9
    # What reaches to the end of the context is left to the engine.
    assert enforce(shape, 4095, context=4096) == raw(body)
    assert enforce(shape, 4094, context=4096) != raw(body)


@where_generated
@pytest.mark.parametrize("value", ["5", 5.0, True, [5], {}, -7, 1e3])
def test_a_cap_of_a_wrong_kind_is_refused_by_name(engine: str, path: str, route: Route, value: Any) -> None:
    with pytest.raises(BadBody) as caught:
        route.read(raw(sample(engine, path, value)))
    where = cap_path(engine, path)
    assert where is not None
    assert str(where[-1]) in str(caught.value)


@where_generated
def test_a_cap_beyond_all_integers_of_the_engine_is_replaced(engine: str, path: str, route: Route) -> None:
    shape = route.read(raw(sample(engine, path, 2**70)))

    assert shape.output_cap == 2**70
    assert route.read(enforce(shape, 4000)).output_cap == 4000


@where_generated
def test_zero_tokens_are_refused_or_priced_as_one(engine: str, path: str, route: Route) -> None:
    body = raw(sample(engine, path, 0))
    try:
        shape = route.read(body)
    except BadBody as error:
        message = str(error)
    else:
        assert shape.output_cap == 1
        added = {"max_tokens": 1} if path == "/v1/completions" and b"n_predict" in body else {}
        assert json.loads(enforce(shape, 1)) == json.loads(body) | added
        return
    assert "at least 1" in message


@where_generated
def test_a_nested_key_that_appears_twice_is_refused(engine: str, path: str, route: Route) -> None:
    where = cap_path(engine, path)
    assert where is not None
    name = str(where[-1])
    doubled = raw(sample(engine, path, 5)).replace(
        f'"{name}": 5'.encode(), f'"{name}": 5, "{name}": 500'.encode()
    )

    with pytest.raises(BadBody, match="appears twice"):
        route.read(doubled)


@everywhere
# Bodies are drawn of all fields, which a busy machine takes its time for.
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(fields=LIKELY, data=st.data())
def test_nothing_but_a_bad_body_is_raised_and_only_caps_change(
    engine: str, path: str, route: Route, fields: dict[str, Any], data: st.DataObject
) -> None:
    base = sample(engine, path) if data.draw(st.booleans()) else {}
    body = base | fields
    try:
        shape = route.read(json.dumps(body).encode())
    except BadBody:
        return
    assert shape.parts
    assert shape.output_cap is None or shape.output_cap >= 1
    ENGINES[engine].plan(shape)
    sent = json.loads(enforce(shape, 3))
    for place in shape.cap_places:
        body = without(body, place.path)
        sent = without(sent, place.path)
    assert sent == body


def without(value: Any, path: tuple[Any, ...]) -> Any:
    """`value` without what is at `path`, and without an object that held nothing else."""
    if not path:
        return value
    copy = json.loads(json.dumps(value))
    at, parents = copy, []
    for step in path[:-1]:
        if isinstance(at, dict) and step not in at:
            return copy
        parents.append((at, step))
        at = at[step]
    if isinstance(at, dict):
        at.pop(path[-1], None)
    for parent, step in reversed(parents):
        if isinstance(parent, dict) and not parent[step]:
            del parent[step]
    return copy


def test_the_same_prompt_is_the_same_text_in_every_api() -> None:
    conversations = [
        part
        for engine, path, route in endpoints()
        for part in route.read(raw(sample(engine, path))).parts
        if isinstance(part, Conversation)
    ]
    said = set()
    for part in conversations:
        (message,) = part.messages
        content = message["content"]
        said.add((message["role"], content if isinstance(content, str) else content[0]["text"]))
    assert said == {("user", "PROMPT")}
    assert len(conversations) > 15


def read(engine: str, path: str, **fields: Any) -> RequestShape:
    return ENGINES[engine].routes[path.encode()].read(raw(sample(engine, path) | fields))


@pytest.mark.parametrize(
    ("engine", "path", "fields"),
    [
        ("vllm", "/v1/responses", {"previous_response_id": "r"}),
        ("vllm", "/v1/responses", {"conversation": "c"}),
        ("vllm", "/v1/responses", {"input": [{"type": "item_reference", "id": "i"}]}),
        ("vllm", "/v1/responses", {"tools": [{"type": "web_search"}]}),
        ("vllm", "/v1/messages", {"mcp_servers": [{"url": "u"}]}),
        ("vllm", "/inference/v1/generate", {"features": {}}),
        ("vllm", "/pooling", {"data": {"x": 1}}),
        ("sglang", "/generate", {"image_data": "x"}),
        ("sglang", "/generate", {"session_params": {"id": "s"}}),
        ("lmdeploy", "/generate", {"session_id": 4}),
        ("llamacpp", "/completion", {"prompt": {"prompt_string": "x", "multimodal_data": ["y"]}}),
        ("tgi", "/generate", {"inputs": "see ![](data:image/png;base64,AA) there"}),
        ("ollama", "/api/generate", {"context": [1, 2]}),
        ("ollama", "/api/generate", {"images": ["AA"]}),
    ],
)
def test_a_prompt_that_the_body_hides_costs_a_whole_context(
    engine: str, path: str, fields: dict[str, Any]
) -> None:
    shape = read(engine, path, **fields)

    assert shape.priced_as_whole_context
    assert shape.unseen
    assert ENGINES[engine].plan(shape).is_whole_context
    for cap in (None, 1, 50, 10**9):
        (prompt,) = whole_context(shape, 4096, cap)
        assert prompt >= 1
        assert prompt + min(cap or 4096, 4096 - prompt) - 1 == 4095


@pytest.mark.parametrize(
    ("engine", "path", "fields", "param"),
    [
        ("vllm", "/v1/responses", {"background": True}, "background"),
        ("vllm", "/v1/chat/completions", {"prompt_token_ids": [1]}, "prompt_token_ids"),
        ("sglang", "/v1/chat/completions", {"session_params": {"id": "s"}}, "session_params"),
        ("sglang", "/generate", {"input_ids": [1]}, "text"),
        ("sglang", "/generate", {"input_embeds": [[1.0]]}, "input_embeds"),
        ("sglang", "/generate", {"sampling_params": [{}, {}]}, "sampling_params"),
        ("ollama", "/api/chat", {"options": {"num_ctx": 9}}, "options.num_ctx"),
        ("ollama", "/v1/chat/completions", {"Max_Tokens": 10**6}, "Max_Tokens"),
        ("ollama", "/api/generate", {"oPtions": {"num_predict": 10**6}}, "oPtions"),
        ("ollama", "/api/generate", {"option\u017f": {"num_predict": 10**6}}, "option\u017f"),
        ("llamacpp", "/infill", {"input_suffix": None}, "input_suffix"),
        ("vllm", "/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("vllm", "/v1/completions", {"max_tokens": 0, "n_predict": 5}, "max_tokens"),
        ("vllm", "/inference/v1/generate", {"sampling_params": []}, "sampling_params"),
        ("vllm", "/inference/v1/generate", {"sampling_params": {"n": 0}}, "sampling_params.n"),
    ],
)
def test_what_cannot_be_priced_is_refused_by_name(
    engine: str, path: str, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadBody) as caught:
        read(engine, path, **fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("engine", "path", "fields", "sequences"),
    [
        ("vllm", "/v1/chat/completions/batch", {}, 2),
        ("vllm", "/v1/completions", {"prompt": ["a", [1]][:1] * 3, "n": 2}, 6),
        ("vllm", "/inference/v1/generate", {"sampling_params": {"n": 4}}, 4),
        ("sglang", "/generate", {"text": ["a", "b"], "sampling_params": {"n": 3}}, 6),
        ("sglang", "/generate", {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 5}]}, 10),
        ("llamacpp", "/completion", {"prompt": ["a", [1, "b"], [2]], "n_cmpl": 2}, 6),
        ("llamacpp", "/completion", {"prompt": [1, "a", 2]}, 1),
        ("tgi", "/generate", {"parameters": {"best_of": 3}}, 3),
        ("vllm", "/v1/rerank", {"documents": ["a", "b", "c"]}, 3),
        ("vllm", "/score", {"text_1": "a", "text_2": ["x", "y"]}, 2),
        ("vllm", "/v1/embeddings", {"input": [[1, 2], [3]]}, 2),
        ("vllm", "/v1/embeddings", {"input": [1, 2]}, 1),
    ],
)
def test_every_sequence_of_a_request_counts(
    engine: str, path: str, fields: dict[str, Any], sequences: int
) -> None:
    assert read(engine, path, **fields).sequences == sequences


@pytest.mark.parametrize(
    ("engine", "path", "default"),
    [
        ("vllm", "/v1/chat/completions", None),
        ("vllm", "/v1/completions", 16),
        ("vllm", "/inference/v1/generate", 16),
        ("sglang", "/generate", 128),
        ("sglang", "/v1/completions", 16),
        ("sglang", "/api/chat", 2048),
        ("lmdeploy", "/generate", 128),
        ("llamacpp", "/v1/messages", 4096),
        ("llamacpp", "/v1/completions", None),
        ("tgi", "/generate", None),
    ],
)
def test_an_unset_cap_is_what_the_engine_allows_there(engine: str, path: str, default: int | None) -> None:
    body = sample(engine, path)
    where = cap_path(engine, path)
    assert where is not None
    del body[where[0]]

    shape = ENGINES[engine].routes[path.encode()].read(raw(body))

    assert (shape.output_cap, shape.effective_cap) == (None, default)


def test_null_is_no_limit_where_only_an_absent_cap_has_a_default() -> None:
    for engine, path, field in (
        ("vllm", "/inference/v1/generate", "max_tokens"),
        ("sglang", "/generate", "max_new_tokens"),
    ):
        assert read(engine, path, sampling_params={field: None}).effective_cap is None


def test_each_of_several_sampling_settings_keeps_its_smaller_cap() -> None:
    settings = [{"max_new_tokens": 5}, {"max_new_tokens": 900, "x": 1.50}, {}]
    shape = read("sglang", "/generate", text=["a", "b", "c"], sampling_params=settings)

    assert shape.output_cap == 900
    sent = json.loads(enforce(shape, 300))["sampling_params"]
    assert sent == [{"max_new_tokens": 5}, {"max_new_tokens": 300, "x": 1.5}, {"max_new_tokens": 128}]


def test_a_stream_is_told_by_path_and_body_as_the_engine_tells_it() -> None:
    assert read("ollama", "/api/chat").stream_kind is StreamKind.NDJSON
    assert read("ollama", "/api/chat", stream=False).stream_kind is StreamKind.NONE
    assert read("tgi", "/generate_stream").stream_kind is StreamKind.SSE
    assert read("tgi", "/generate", stream=True).stream_kind is StreamKind.NONE
    assert read("tgi", "/", stream=True).stream_kind is StreamKind.SSE
    assert read("vllm", "/v1/messages", stream=True).stream_kind is StreamKind.SSE


def test_all_that_a_conversation_says_is_kept_when_it_is_turned() -> None:
    shape = read(
        "vllm",
        "/v1/messages",
        system=[{"type": "text", "text": "SYS"}],
        tools=[{"name": "TOOL", "description": "DESC", "input_schema": {"x": "SCHEMA"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "ASK"}, {"type": "image", "source": {}}]},
            {"role": "assistant", "content": [{"type": "tool_use", "name": "CALL", "input": {"a": "ARGS"}},
                                              {"type": "thinking", "thinking": "THOUGHT"}]},
            {"role": "user", "content": [{"type": "tool_result", "content": "RESULT"}]},
        ],
    )  # fmt: skip
    (part,) = shape.parts

    assert isinstance(part, Conversation)
    written = json.dumps([part.messages, part.tools])
    for said in ("SYS", "TOOL", "DESC", "SCHEMA", "ASK", "CALL", "ARGS", "THOUGHT", "RESULT"):
        assert said in written
    assert part.media == shape.media == 1


def test_all_items_of_a_response_are_kept_when_they_are_turned() -> None:
    shape = read(
        "vllm",
        "/v1/responses",
        instructions="SYS",
        tools=[{"type": "function", "name": "TOOL", "parameters": {"x": "SCHEMA"}}],
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "ASK"}]},
            {"type": "function_call", "name": "CALL", "arguments": "ARGS", "call_id": "1"},
            {"type": "function_call_output", "call_id": "1", "output": "RESULT"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "THOUGHT"}]},
        ],
    )
    (part,) = shape.parts

    assert isinstance(part, Conversation)
    written = json.dumps([part.messages, part.tools])
    for said in ("SYS", "TOOL", "SCHEMA", "ASK", "CALL", "ARGS", "RESULT", "THOUGHT"):
        assert said in written
    assert (shape.api, shape.media) == (Api.RESPONSES, 0)


@pytest.mark.parametrize("content", [[{"type": "image_url"}], [{"type": "input_audio"}], [{"type": "new"}]])
def test_what_is_not_text_is_counted_as_media(content: Any) -> None:
    assert read("vllm", "/v1/chat/completions", messages=[{"role": "user", "content": content}]).media == 1


def test_paths_are_priced_free_or_neither_and_never_two_of_them() -> None:
    for engine in ENGINES.values():
        assert not set(engine.routes) & engine.free_posts
        assert route_for(engine.routes, b"POST", b"/v1/chat/completions") is not None
        assert route_for(engine.routes, b"PUT", b"/v1/chat/completions") is None
        assert route_for(engine.routes, b"POST", b"/v1/chat/completions/") is None
        assert is_free(engine.free_posts, b"GET", b"/v1/models")
        assert not is_free(engine.free_posts, b"POST", b"/invocations")
        assert not is_free(engine.free_posts, b"DELETE", b"/tokenize")
    assert is_free(ENGINES["vllm"].free_posts, b"POST", b"/v1/messages/count_tokens")
    assert route_for(ENGINES["vllm"].routes, b"POST", b"/completion") is None


def test_letters_are_looked_at_after_the_body_is_read() -> None:
    strict = in_exact_letters(ENGINES["generic"].routes[b"/v1/chat/completions"].read)

    assert strict(raw(sample("generic", "/v1/chat/completions") | {"X": 1})).output_cap == CAP


def test_a_hidden_prompt_is_told_apart_from_an_empty_one() -> None:
    assert read("ollama", "/api/chat", messages=[]).unseen is None
    assert isinstance(read("ollama", "/api/generate", context=[5]).parts[0], Unseen)


@pytest.mark.parametrize("named", [[], {}, 1, None, "image_url"])
def test_a_part_of_no_known_kind_is_media_and_no_error(named: Any) -> None:
    assert media_in([{"type": named}, {"type": "text", "text": "a"}]) == 1
