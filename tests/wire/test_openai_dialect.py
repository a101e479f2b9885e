"""Chat completions and completions: what is read, what is refused, what is enforced."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from kvgate.wire.body import BadBody
from kvgate.wire.dialects.openai import enforce, read_chat, read_completion
from kvgate.wire.engines.known import ENGINES
from kvgate.wire.routes import route_for

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": MESSAGES, **fields}).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"prompt": "hi", **fields}).encode()


@pytest.mark.parametrize(
    ("fields", "cap"),
    [
        ({}, None),
        ({"max_tokens": None}, None),
        ({"max_tokens": -1}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
        ({"n_predict": 9}, 9),
        ({"max_tokens": 10**30}, 10**30),
    ],
)
def test_the_cap_is_the_first_that_is_set(fields: dict[str, Any], cap: int | None) -> None:
    assert read_chat(chat(**fields)).output_cap == cap


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": None},
        {"max_tokens": 9, "n_predict": -1},
        {"max_completion_tokens": 7},
        {"n_predict": 9},
    ],
)
def test_every_cap_field_of_the_forwarded_body_carries_the_reserved_cap(fields: dict[str, Any]) -> None:
    sent = json.loads(enforce(read_chat(chat(**fields)), 4))

    assert {sent[name] for name in ("max_tokens", "max_completion_tokens", "n_predict") if name in sent} == {
        4
    }
    assert "max_tokens" in sent or "max_completion_tokens" in sent
    assert sent["messages"] == MESSAGES


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
@pytest.mark.parametrize("value", ["5", 5.0, 0, -2, True, [5], {}])
def test_a_cap_of_a_wrong_kind_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(BadBody) as caught:
        read_chat(chat(**{name: value}))
    assert caught.value.param == name


@pytest.mark.parametrize("name", ["n", "best_of", "n_cmpl"])
@pytest.mark.parametrize("value", ["2", 2.5, 0, -1, False, 257])
def test_a_number_of_choices_of_a_wrong_kind_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(BadBody) as caught:
        read_completion(completion(**{name: value}))
    assert caught.value.param == name


def test_the_largest_number_of_choices_counts() -> None:
    assert read_completion(completion(n=2, best_of=5)).choices == 5


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2, 3], ([1, 2, 3],)),
        ([[1, 2], [3]], ([1, 2], [3])),
    ],
)
def test_each_prompt_of_a_list_is_a_prompt_of_its_own(prompt: Any, prompts: tuple[Any, ...]) -> None:
    assert read_completion(completion(prompt=prompt)).prompts == prompts


@pytest.mark.parametrize(
    "prompt", [None, 5, {}, [], [1, "a"], [[]], [["a"]], [True], [-1], ["a"] * 257, {"prompt_string": "x"}]
)
def test_a_prompt_that_cannot_be_counted_is_refused(prompt: Any) -> None:
    with pytest.raises(BadBody) as caught:
        read_completion(completion(prompt=prompt))
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("messages", [None, "hi", [], [1], [{}], [{"role": 3}]])
def test_messages_of_a_wrong_kind_are_refused(messages: Any) -> None:
    with pytest.raises(BadBody) as caught:
        read_chat(chat(messages=messages))
    assert caught.value.param == "messages"


@pytest.mark.parametrize("fields", [{"stream": "yes"}, {"stream": 1}, {"model": 3}])
def test_other_fields_that_count_are_checked(fields: dict[str, Any]) -> None:
    with pytest.raises(BadBody):
        read_chat(chat(**fields))


@pytest.mark.parametrize("fields", [{"prompt_embeds": "AA=="}, {"input_ids": [1]}])
def test_a_prompt_that_the_count_would_not_see_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadBody, match="cannot be priced"):
        read_chat(chat(**fields))


def test_a_prompt_hidden_in_transfer_parameters_is_refused() -> None:
    with pytest.raises(BadBody, match="hides the prompt"):
        read_chat(chat(kv_transfer_params={"prompt_token_ids": [1, 2]}))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        (b"POST", b"/v1/chat/completions/"),
        (b"POST", b"//v1/chat/completions"),
        (b"POST", b"/v1/chat/completion%73"),
        (b"POST", b"/v1/embeddings"),
        (b"PUT", b"/v1/chat/completions"),
    ],
)
def test_only_the_exact_path_is_priced(method: bytes, path: bytes) -> None:
    assert route_for(ENGINES["tensorrt-llm"].routes, method, path) is None


def test_both_endpoints_are_priced() -> None:
    # Ollama takes field names in any letters, and has readers around these that refuse that.
    for engine in (each for name, each in ENGINES.items() if name != "ollama"):
        assert engine.routes[b"/v1/chat/completions"].read is read_chat
        completion = engine.routes[b"/v1/completions"].read
        assert isinstance(completion, partial)
        assert completion.func is read_completion
