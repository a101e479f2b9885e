"""Chats of Mistral's models are counted as mistral-common writes them, and never guessed without it."""

from __future__ import annotations

import base64
import copy
import sys
from pathlib import Path
from typing import Any

import pytest
from converted import NATIVE, directory
from mistral_chats import CALL, CHATS, RESULT, answer, bodies, user
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from tiny import write_model

from kvgate.tokens import BadTokenizer, CannotCount, PromptCounter, load
from kvgate.tokens.loader import load_files
from kvgate.tokens.mistral import native_file


@pytest.fixture(scope="module", params=NATIVE)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directory(tmp_path_factory.mktemp("native"), *NATIVE[request.param])


def expected(tokenizer: Any, body: dict[str, Any]) -> int | None:
    """The library's own count; None where it refuses."""
    messages = copy.deepcopy(body["messages"])
    for message in messages:
        for call in message.get("tool_calls") or ():
            call["id"] = call["id"][-9:]
        if "tool_call_id" in message:
            message["tool_call_id"] = message["tool_call_id"][-9:]
    try:
        chat = ChatCompletionRequest.from_openai(
            messages=messages,
            tools=body.get("tools"),
            continue_final_message=body.get("continue_final_message", False),
        )
        return len(tokenizer.encode_chat_completion(chat).tokens)
    except Exception:
        return None


def test_chats_count_like_mistral_common(model: Path) -> None:
    path = native_file(model)
    assert path is not None
    tokenizer, counter = MistralTokenizer.from_file(path), load(model, accelerators=())
    counted = 0
    for number, body in enumerate([*CHATS, *bodies(60)]):
        truth = expected(tokenizer, body)
        if truth is None:
            with pytest.raises(CannotCount, match="mistral-common refuses this chat"):
                counter.count_chat(body)
            continue
        count = counter.count_chat(body)
        assert (count.prompt_tokens, count.is_exact, count.source) == (truth, True, "tokenizer"), number
        counted += 1
    assert counted > 50
    assert (counter.rendered_by, counter.renders_as_vllm) == ("mistral-common", True)
    # The texts in between went through the cache of this counter.
    assert counter.cache.hits > 20


@pytest.fixture(scope="module")
def tekken(tmp_path_factory: pytest.TempPathFactory) -> PromptCounter:
    files = load_files(directory(tmp_path_factory.mktemp("tekken"), *NATIVE["tekken"]))
    return PromptCounter(files, accelerators=())


def test_the_parts_add_up(tekken: PromptCounter) -> None:
    for body in [*CHATS, *bodies(20)]:
        try:
            count = tekken.count_chat(body, with_parts=True)
        except CannotCount:
            continue
        assert sum(part.tokens for part in count.parts) == count.prompt_tokens
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    messages = [{"role": "system", "content": "be brief"}, user("one two three")]
    parts = {
        part.name: part.tokens
        for part in tekken.count_chat({"messages": messages, "tools": [tool]}, with_parts=True).parts
    }
    assert list(parts) == ["tools", "system", "messages[1]", "template"]
    assert parts["messages[1]"] == 3
    assert parts["tools"] > 10


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"chat_template": "x"}, "'chat_template' is refused"),
        ({"chat_template_kwargs": {}}, "'chat_template_kwargs' is refused"),
        ({"continue_final_message": True}, "cannot both be true"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "needs a final message"),
        ({"continue_final_message": "yes"}, "must be true or false"),
        ({"messages": [user("hi"), answer("ok")]}, "set 'continue_final_message'"),
        ({"messages": [user("hi"), answer("x", tool_calls="f"), RESULT]}, "must be a list"),
        ({"messages": [user("hi"), answer(None, tool_calls=[{**CALL, "id": None}]), RESULT]}, "needs an id"),
        ({"messages": [user(["a"])]}, "type None"),
        ({"messages": [user("half \ud83d")]}, "mistral-common refuses|surrogate"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "Unknown message role"),
    ],
)
def test_what_vllm_refuses_is_not_counted(fields: dict[str, Any], why: str, tekken: PromptCounter) -> None:
    with pytest.raises(CannotCount, match=why):
        tekken.count_chat({"messages": [user("hi")], **fields})


def test_no_file_is_opened_and_no_address_called_for_an_image(tekken: PromptCounter, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(base64.b64decode("iVBORw0KGgo="))
    for url in (f"file://{tmp_path}/secret.png", "http://127.0.0.1:9/x.png"):
        part = {"type": "image_url", "image_url": {"url": url}}
        with pytest.raises(CannotCount, match="'image_url' are not counted here"):
            tekken.count_chat({"messages": [user([part])]})


def test_without_the_library_texts_are_counted_and_chats_name_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mistral_common.protocol.instruct.request", None)
    counter = load(directory(tmp_path, *NATIVE["v3"]), accelerators=())
    assert counter.count_text("the").prompt_tokens == 2
    assert not counter.renders_as_vllm
    with pytest.raises(CannotCount, match=r"pip install 'kvgate\[mistral\]'"):
        counter.count_chat({"messages": [user("hi")]})


def test_a_library_that_asks_for_more_than_counts_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its texts are counted by us only while that comes to its own count."""
    from mistral_common.tokens.tokenizers.instruct import InstructTokenizerV1

    def with_the_ids(self: Any, tokens: list[int]) -> list[int]:
        return [self.tokenizer.bos_id] * (1 + (sum(tokens) > 0))

    own = InstructTokenizerV1.encode_user_content

    def encode(self: Any, *args: Any, **more: Any) -> Any:
        tokens, *rest = own(self, *args, **more)
        return with_the_ids(self, tokens) + tokens, *rest

    monkeypatch.setattr(InstructTokenizerV1, "encode_user_content", encode)
    folder = directory(tmp_path, *NATIVE["v1"])
    truth = expected(MistralTokenizer.from_file(folder / "tokenizer.model.v1"), {"messages": [user("hi")]})
    assert load(folder, accelerators=()).count_chat({"messages": [user("hi")]}).prompt_tokens == truth


def test_of_two_formats_the_one_that_vllm_takes_is_read(tmp_path: Path) -> None:
    write_model(directory(tmp_path, *NATIVE["v3"]))
    both = load_files(tmp_path)
    assert (both.path.name, both.rendered_by, both.is_native) == ("tokenizer.json", "mistral-common", False)
    assert both.template is not None

    (tmp_path / "consolidated.safetensors").touch()
    weights = load_files(tmp_path)
    assert (weights.path.name, weights.is_native) == ("tokenizer.model.v3", True)
    assert weights.template is None


def test_the_newest_of_mistrals_files_is_taken(tmp_path: Path) -> None:
    assert native_file(tmp_path) is None
    directory(tmp_path, *NATIVE["v1"])
    (tmp_path / "tokenizer.model.very_old").touch()
    assert native_file(tmp_path) == tmp_path / "tokenizer.model.v1"
    directory(tmp_path, *NATIVE["v3"])
    assert native_file(tmp_path) == tmp_path / "tokenizer.model.v3"
    directory(tmp_path, *NATIVE["tekken"])
    assert native_file(tmp_path) == tmp_path / "tekken.json"


def test_a_damaged_file_of_mistrals_is_told(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model.v3").write_bytes(NATIVE["v3"][0].read_bytes()[:9000])
    with pytest.raises(BadTokenizer, match=r"tokenizer\.model\.v3 is not a SentencePiece model"):
        load(tmp_path)


def test_many_short_messages_are_counted_off_the_loop(
    tekken: PromptCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tekken.is_long(2_049)
    monkeypatch.setattr(PromptCounter, "counted_by", "quicktok")
    assert not tekken.is_long(8_192)
    assert tekken.is_long(8_193)


@pytest.mark.parametrize("messages", [[], [{"content": "x"}], [5], {}])
def test_messages_of_an_unexpected_form_are_not_counted(tekken: PromptCounter, messages: Any) -> None:
    with pytest.raises(CannotCount):
        tekken.count_chat({"messages": messages})
