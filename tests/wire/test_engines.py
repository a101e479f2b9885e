"""What is asked of each engine to count a prompt, and how its answer is read."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.wire.dialects.openai import read_chat, read_completion
from kvgate.wire.dialects.shape import Conversation, Mixed, RequestShape
from kvgate.wire.engines import CountCall, CountPlan, NoCount, bounds
from kvgate.wire.engines.known import ENGINES

CHAT = b'{"messages":[{"role":"user","content":"hi"}],"tools":[]}'


def terms(engine: str, shape: RequestShape) -> list[CountCall | int]:
    """All that the engine's count of `shape` is added up of."""
    return [term for part in ENGINES[engine].plan(shape).parts for term in part]


def test_a_chat_is_counted_with_everything_that_the_template_may_use() -> None:
    for name, path in (("llamacpp", "/v1/chat/completions/input_tokens"), ("vllm", "/tokenize")):
        (call,) = terms(name, read_chat(CHAT))

        assert isinstance(call, CountCall)
        assert (path, CHAT) == (call.path, call.body)


def test_token_ids_need_no_call() -> None:
    for engine in ENGINES.values():
        plan = engine.plan(read_completion(b'{"prompt":[[1,2],[3]]}'))
        assert plan.is_whole_context if engine.is_partitioned else plan.known == (2, 1)


def test_each_text_is_counted_by_itself() -> None:
    calls = terms("llamacpp", read_completion(b'{"prompt":["a","b"]}'))

    assert [json.loads(c.body)["content"] for c in calls if isinstance(c, CountCall)] == ["a", "b"]


def test_vllm_counts_special_tokens_as_the_request_says() -> None:
    (call,) = terms("vllm", read_completion(b'{"prompt":"a","add_special_tokens":false}'))

    assert isinstance(call, CountCall)
    assert json.loads(call.body) == {"prompt": "a", "add_special_tokens": False}
    assert call.read(b'{"count": 3, "tokens": [1,2,3]}') == 3


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"{}", b'{"input_tokens": "3"}', b'{"input_tokens": -1}', b"x"]
)
def test_an_answer_without_a_count_is_not_guessed_at(answer: bytes) -> None:
    (call,) = terms("llamacpp", read_chat(CHAT))
    assert isinstance(call, CountCall)

    with pytest.raises(NoCount):
        call.read(answer)


@pytest.mark.parametrize("answer", [b"", b"{}", b'{"tokens": 3}'])
def test_a_token_list_that_is_none_is_not_guessed_at(answer: bytes) -> None:
    (call,) = terms("llamacpp", read_completion(b'{"prompt":"a"}'))
    assert isinstance(call, CountCall)

    with pytest.raises(NoCount):
        call.read(answer)


def test_the_header_that_lets_a_generation_outlive_its_client_is_dropped_on_llamacpp() -> None:
    assert b"x-conversation-id" in ENGINES["llamacpp"].drop_headers


def plan(engine: str, path: str, body: dict[str, Any]) -> CountPlan:
    rules = ENGINES[engine]
    return rules.plan(rules.routes[path.encode()].read(json.dumps(body).encode()))


HELLO = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
TOOLS = HELLO | {"tools": [{"type": "function", "function": {"name": "f"}}]}


@pytest.mark.parametrize(
    ("engine", "path", "body", "calls", "source"),
    [
        ("vllm", "/v1/chat/completions", HELLO, ["/tokenize"], "engine"),
        ("vllm", "/v1/messages", HELLO, ["/v1/messages/count_tokens"], "engine"),
        ("vllm", "/v1/responses", {"input": "hi"}, ["/tokenize"], "bound"),
        ("vllm", "/v1/embeddings", {"input": ["a", "b"]}, ["/tokenize"] * 2, "engine"),
        ("vllm", "/v1/embeddings", {"input": ["a"] * 65}, [], "bound"),
        ("vllm", "/v1/rerank", {"query": "q", "documents": ["d"]}, ["/tokenize"] * 2, "bound"),
        ("vllm", "/inference/v1/generate", {"token_ids": [1, 2]}, [], "request"),
        ("llamacpp", "/v1/responses", {"input": "hi"}, ["/v1/responses/input_tokens"], "engine"),
        ("llamacpp", "/v1/messages", HELLO, ["/v1/messages/count_tokens"], "engine"),
        ("llamacpp", "/completion", {"prompt": [1, "a", 2]}, ["/tokenize"], "engine"),
        ("llamacpp", "/infill", {"input_prefix": "a", "input_suffix": "b"}, ["/tokenize"] * 2, "bound"),
        ("sglang", "/v1/chat/completions", HELLO, ["/tokenize"], "bound"),
        ("sglang", "/v1/messages", HELLO, ["/v1/messages/count_tokens"], "engine"),
        ("sglang", "/generate", {"text": "a"}, ["/tokenize"], "engine"),
        ("tgi", "/v1/chat/completions", TOOLS, ["/chat_tokenize"], "engine"),
        ("tgi", "/generate", {"inputs": "a"}, ["/tokenize"], "engine"),
        ("lmdeploy", "/generate", {"prompt": "a"}, ["/v1/encode"], "engine"),
        ("tensorrt-llm", "/v1/chat/completions", TOOLS, [], "bound"),
        ("generic", "/v1/completions", {"prompt": "a"}, [], "bound"),
    ],
)
def test_each_engine_is_asked_what_it_can_count_and_the_rest_is_a_marked_bound(
    engine: str, path: str, body: dict[str, Any], calls: list[str], source: str
) -> None:
    made = plan(engine, path, body)

    assert [t.path for terms in made.parts for t in terms if isinstance(t, CountCall)] == calls
    assert made.source == source
    assert (made.known is None) == bool(calls)
    assert not made.is_whole_context


def test_each_conversation_of_a_batch_is_counted_with_the_tools_of_all() -> None:
    body = TOOLS | {"messages": [[{"role": "user", "content": w}] for w in ("a", "b")]}
    calls = [t for terms in plan("vllm", "/v1/chat/completions/batch", body).parts for t in terms]

    sent = [json.loads(call.body) for call in calls if isinstance(call, CountCall)]
    assert [one["messages"][0]["content"] for one in sent] == ["a", "b"]
    assert all(one["tools"] == TOOLS["tools"] for one in sent)


@pytest.mark.parametrize(
    ("engine", "path", "body"),
    [
        (
            "sglang",
            "/v1/chat/completions",
            HELLO | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        ),
        (
            "generic",
            "/v1/chat/completions",
            HELLO | {"chat_template": "{% for i in range(9**9) %}x{% endfor %}"},
        ),
        ("ollama", "/v1/completions", {"prompt": "a", "max_tokens": 3}),
    ],
)
def test_what_nobody_can_bound_costs_a_whole_context(engine: str, path: str, body: dict[str, Any]) -> None:
    made = plan(engine, path, body)

    assert made.is_whole_context
    assert made.why


def test_images_are_counted_where_the_engine_counts_them() -> None:
    body = HELLO | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}

    assert plan("vllm", "/v1/chat/completions", body).source == "engine"
    assert plan("vllm", "/v1/responses", {"input": body["messages"]}).is_whole_context


@pytest.mark.parametrize(
    ("engine", "path", "body", "answer", "count"),
    [
        ("tgi", "/generate", {"inputs": "a"}, b'[{"id":1},{"id":2}]', 2),
        ("tgi", "/v1/chat/completions", HELLO, b'{"tokenize_response":[{"id":1}],"templated_text":"x"}', 1),
        ("lmdeploy", "/generate", {"prompt": "a"}, b'{"input_ids":[1,2,3],"length":3}', 3),
        ("sglang", "/generate", {"text": "a"}, b'{"tokens":[1],"count":1,"max_model_len":9}', 1),
        ("vllm", "/v1/messages", HELLO, b'{"input_tokens":12}', 12),
    ],
)
def test_the_count_is_read_out_of_each_answer(
    engine: str, path: str, body: dict[str, Any], answer: bytes, count: int
) -> None:
    ((call,),) = plan(engine, path, body).parts
    assert isinstance(call, CountCall)

    assert call.read(answer) == count
    for wrong in (b"", b"{}", b"3", b"null", b'{"count":-1,"length":true,"input_tokens":1.5}'):
        with pytest.raises(NoCount):
            call.read(wrong)


@given(st.text())
def test_a_text_has_no_more_tokens_than_its_bound_in_any_normal_form(text: str) -> None:
    for form in ("NFC", "NFKC", None):
        seen = unicodedata.normalize(form, text) if form else text  # type: ignore[arg-type]
        assert len(seen.encode("utf-8", "surrogatepass")) <= bounds.text_bound(text)


def test_one_character_that_becomes_many_is_bounded() -> None:
    assert bounds.text_bound("\ufdfa" * 10) >= 330


@given(
    st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), st.text()), min_size=1, max_size=5)
)
def test_a_conversation_is_bounded_by_the_bytes_of_its_texts_and_its_markers(
    said: list[tuple[str, str]],
) -> None:
    conversation = Conversation([{"role": role, "content": text} for role, text in said])
    rendered = "".join(f"<|{role}|>{text}<|end|>" for role, text in said)

    assert bounds.conversation_bound(conversation) >= len(rendered.encode("utf-8", "surrogatepass"))


def test_pieces_are_bounded_one_by_one() -> None:
    assert bounds.mixed_bound(Mixed(("ab", [1, 2, 3]), overhead=7)) == 2 + bounds.TEXT_MARGIN + 3 + 7
