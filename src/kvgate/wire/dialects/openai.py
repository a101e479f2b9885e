"""OpenAI chat completions and completions, as the engines understand them.

Promises: a body that this file accepts can make the engine hold no more than `Shape` says, once
`enforce` has written the cap; a body that it cannot price is refused with a reason, not guessed at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvgate.wire.body import BadBody, Body

# Every name under which some engine takes the cap of new tokens. All that are present get the
# reserved cap, because engines disagree on which one wins.
CAP_FIELDS = ("max_completion_tokens", "max_tokens", "n_predict")
# Names under which some engine takes the number of sequences for a prompt.
CHOICE_FIELDS = ("n", "best_of", "n_cmpl")
# These replace the prompt by something that the counted text does not show.
UNSEEN_PROMPTS = ("prompt_embeds", "input_ids", "input_embeds")

PROMPTS_MAX = 256
CHOICES_MAX = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """What a request asks for. `prompts` holds texts or token ids; it is empty for a chat."""

    body: Body
    is_chat: bool
    prompts: tuple[str | list[int], ...]
    output_cap: int | None
    choices: int
    stream: bool

    @property
    def sequences(self) -> int:
        return self.choices * max(1, len(self.prompts))


def read_chat(raw: bytes) -> Shape:
    """The shape of a `/v1/chat/completions` body. Raises `BadBody`."""
    body = Body(raw)
    fields = body.fields
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadBody("'messages' must be a list with at least one message", "messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadBody(f"'messages[{index}]' must be an object", "messages")
        if not isinstance(message.get("role"), str):
            raise BadBody(f"'messages[{index}].role' must be a string", "messages")
    transfer = fields.get("kv_transfer_params")
    if isinstance(transfer, dict) and "prompt_token_ids" in transfer:
        raise BadBody("'kv_transfer_params.prompt_token_ids' hides the prompt", "kv_transfer_params")
    return _shape(body, True, ())


def read_completion(raw: bytes) -> Shape:
    """The shape of a `/v1/completions` body. Raises `BadBody`."""
    body = Body(raw)
    return _shape(body, False, _prompts(body.fields.get("prompt")))


def enforce(shape: Shape, output_cap: int) -> bytes:
    """The body to forward: every cap field present carries `output_cap`, and at least one is."""
    present = [name for name in CAP_FIELDS if name in shape.body.fields]
    if not any(name in present for name in ("max_tokens", "max_completion_tokens")):
        present.append("max_tokens")
    return shape.body.replaced(dict.fromkeys(present, output_cap))


def _shape(body: Body, is_chat: bool, prompts: tuple[str | list[int], ...]) -> Shape:
    fields = body.fields
    for name in UNSEEN_PROMPTS:
        if fields.get(name) is not None:
            raise BadBody(f"{name!r} cannot be priced; send the prompt itself", name)
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise BadBody(f"'model' must be a string, got {_kind(model)}", "model")
    stream = fields.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise BadBody(f"'stream' must be true or false, got {_kind(stream)}", "stream")
    choices = max(_count(fields, name, CHOICES_MAX) for name in CHOICE_FIELDS)
    return Shape(body, is_chat, prompts, _output_cap(fields), choices, bool(stream))


def _output_cap(fields: dict[str, Any]) -> int | None:
    """The first cap that is set, in the order in which engines look."""
    found: int | None = None
    for name in CAP_FIELDS:
        value = fields.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadBody(f"{name!r} must be an integer or null, got {_kind(value)}", name)
        if value == -1:
            continue  # llama.cpp's way to say unset
        if value < 1:
            raise BadBody(f"{name!r} must be at least 1, got {value}", name)
        if found is None:
            found = value
    return found


def _count(fields: dict[str, Any], name: str, limit: int) -> int:
    value = fields.get(name)
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadBody(f"{name!r} must be an integer or null, got {_kind(value)}", name)
    if not 1 <= value <= limit:
        raise BadBody(f"{name!r} must be from 1 to {limit}, got {value}", name)
    return value


def _prompts(prompt: Any) -> tuple[str | list[int], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if not isinstance(prompt, list) or not prompt:
        raise BadBody(
            f"'prompt' must be a string, a list of strings or token ids, got {_kind(prompt)}", "prompt"
        )
    if all(isinstance(part, str) for part in prompt):
        parts: list[str | list[int]] = list(prompt)
    elif _is_token_list(prompt):
        parts = [prompt]
    elif all(isinstance(part, list) and part and _is_token_list(part) for part in prompt):
        parts = list(prompt)
    else:
        raise BadBody("'prompt' must hold only strings, only token ids, or only lists of them", "prompt")
    if len(parts) > PROMPTS_MAX:
        raise BadBody(f"'prompt' may hold {PROMPTS_MAX} prompts, got {len(parts)}", "prompt")
    return tuple(parts)


def _is_token_list(value: list[Any]) -> bool:
    # `type` and not `isinstance`, which lets booleans pass; both steps run in C, because token
    # lists are long.
    return set(map(type, value)) == {int} and min(value) >= 0


def _kind(value: Any) -> str:
    names = {str: "a string", bool: "a boolean", float: "a float", list: "a list", dict: "an object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
