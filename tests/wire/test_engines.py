"""What is asked of each engine to count a prompt, and how its answer is read."""

from __future__ import annotations

import json

import pytest

from kvgate.wire.dialects.openai import read_chat, read_completion
from kvgate.wire.engines import CountCall, NoCount
from kvgate.wire.engines.known import ENGINES

CHAT = b'{"messages":[{"role":"user","content":"hi"}],"tools":[]}'


def test_a_chat_is_counted_with_everything_that_the_template_may_use() -> None:
    for name, path in (("llamacpp", "/v1/chat/completions/input_tokens"), ("vllm", "/tokenize")):
        (call,) = ENGINES[name].count_calls(read_chat(CHAT))

        assert isinstance(call, CountCall)
        assert (path, CHAT) == (call.path, call.body)


def test_token_ids_need_no_call() -> None:
    for engine in ENGINES.values():
        assert engine.count_calls(read_completion(b'{"prompt":[[1,2],[3]]}')) == [2, 1]


def test_each_text_is_counted_by_itself() -> None:
    calls = ENGINES["llamacpp"].count_calls(read_completion(b'{"prompt":["a","b"]}'))

    assert [json.loads(c.body)["content"] for c in calls if isinstance(c, CountCall)] == ["a", "b"]


def test_vllm_counts_special_tokens_as_the_request_says() -> None:
    (call,) = ENGINES["vllm"].count_calls(read_completion(b'{"prompt":"a","add_special_tokens":false}'))

    assert isinstance(call, CountCall)
    assert json.loads(call.body) == {"prompt": "a", "add_special_tokens": False}
    assert call.read(b'{"count": 3, "tokens": [1,2,3]}') == 3


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"{}", b'{"input_tokens": "3"}', b'{"input_tokens": -1}', b"x"]
)
def test_an_answer_without_a_count_is_not_guessed_at(answer: bytes) -> None:
    (call,) = ENGINES["llamacpp"].count_calls(read_chat(CHAT))
    assert isinstance(call, CountCall)

    with pytest.raises(NoCount):
        call.read(answer)


@pytest.mark.parametrize("answer", [b"", b"{}", b'{"tokens": 3}'])
def test_a_token_list_that_is_none_is_not_guessed_at(answer: bytes) -> None:
    (call,) = ENGINES["llamacpp"].count_calls(read_completion(b'{"prompt":"a"}'))
    assert isinstance(call, CountCall)

    with pytest.raises(NoCount):
        call.read(answer)


def test_the_header_that_lets_a_generation_outlive_its_client_is_dropped_on_llamacpp() -> None:
    assert b"x-conversation-id" in ENGINES["llamacpp"].drop_headers
