"""OpenAI chat completions and completions, as the engines understand them.

Promises: a body that this file accepts can make the engine hold no more than `Shape` says, once
`enforce` has written the cap; a body that it cannot price is refused with a reason, not guessed at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvgate.wire.body import BadBody, Body
from kvgate.wire.dialects.chats import conversation_of, messages_of
from kvgate.wire.dialects.fields import (
    PROMPTS_MAX,
    cap_of,
    choices_of,
    flag,
    is_token_list,
    kind,
    object_of,
    refuse,
    refuse_outliving,
    text_of,
)
from kvgate.wire.dialects.shape import Api, CapPlace, Mixed, Part, RequestShape, StreamKind, Unseen
from kvgate.wire.dialects.shape import enforce as enforce

Shape = RequestShape

# Every name under which some engine takes the cap of new tokens, in the order in which engines look.
# All that are present are held to the reserved cap, because engines disagree on which one wins.
CAP_FIELDS = ("max_completion_tokens", "max_tokens", "n_predict")
# Names under which some engine takes the number of sequences for a prompt.
CHOICE_FIELDS = ("n", "best_of", "n_cmpl")
# These replace the prompt by something that the counted text does not show.
UNSEEN_PROMPTS = ("prompt_embeds", "input_ids", "input_embeds", "prompt_token_ids")
_HIDING = frozenset({*UNSEEN_PROMPTS, "kv_transfer_params", "session_params"})
_CHOICES = frozenset(CHOICE_FIELDS)
_NO_CAP = (CapPlace(("max_tokens",)),)
# Tokens that an engine's fill-in-the-middle template may put around prompt and suffix.
SUFFIX_OVERHEAD = 16


def read_chat(raw: bytes, *, default_cap: int | None = None) -> Shape:
    """The shape of a `/v1/chat/completions` body. Raises `BadBody`."""
    body = Body(raw)
    messages = messages_of(body.fields.get("messages"))
    return _shape(body, Api.CHAT, (conversation_of(messages, body.fields),), default_cap)


def read_chat_batch(raw: bytes, *, default_cap: int | None = None) -> Shape:
    """vLLM's `/v1/chat/completions/batch`: `messages` is a list of conversations."""
    body = Body(raw)
    given = body.fields.get("messages")
    if not isinstance(given, list) or not 1 <= len(given) <= PROMPTS_MAX:
        raise BadBody(f"'messages' must be a list of 1 to {PROMPTS_MAX} conversations", "messages")
    parts = tuple(conversation_of(messages_of(messages), body.fields) for messages in given)
    return _shape(body, Api.CHAT, parts, default_cap)


def read_completion(raw: bytes, *, default_cap: int | None = None, mixed: bool = False) -> Shape:
    """The shape of a `/v1/completions` body. Raises `BadBody`.

    `mixed`: the engine takes prompts of texts and token ids together, as llama.cpp does.
    """
    body = Body(raw)
    parts = prompt_parts(body.fields.get("prompt"), mixed=mixed)
    suffix = text_of(body.fields, "suffix")
    if suffix:
        parts = tuple(_with_suffix(part, suffix) for part in parts)
    return _shape(body, Api.COMPLETION, parts, default_cap)


def prompt_parts(prompt: Any, name: str = "prompt", *, mixed: bool = False) -> tuple[Part, ...]:
    """The prompts of a field that holds a text, token ids, or a list of either. Raises `BadBody`."""
    if isinstance(prompt, str):
        return (prompt,)
    if mixed and isinstance(prompt, dict):
        return (_mixed_part(prompt, name),)
    if not isinstance(prompt, list) or not prompt:
        raise BadBody(f"{name!r} must be a string, a list of strings or token ids, got {kind(prompt)}", name)
    parts: tuple[Part, ...]
    if is_token_list(prompt):
        return (prompt,)
    is_texts = all(isinstance(part, str) for part in prompt)
    if is_texts or all(isinstance(part, list) and is_token_list(part) for part in prompt):
        parts = tuple(prompt)
    elif mixed and any(type(part) is int for part in prompt):
        parts = (_mixed_part(prompt, name),)
    elif mixed:
        parts = tuple(_mixed_part(part, name) for part in prompt)
    else:
        raise BadBody(f"{name!r} must hold only strings, only token ids, or only lists of them", name)
    if len(parts) > PROMPTS_MAX:
        raise BadBody(f"{name!r} may hold {PROMPTS_MAX} prompts, got {len(parts)}", name)
    return parts


def _mixed_part(part: Any, name: str) -> Part:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        if part.get("multimodal_data"):
            return Unseen("the prompt holds images or audio")
        if isinstance(part.get("prompt_string"), str):
            return str(part["prompt_string"])
    elif isinstance(part, list) and part:
        if is_token_list(part):
            return part
        pieces = tuple([piece] if type(piece) is int else piece for piece in part)
        if all(isinstance(p, str) or (isinstance(p, list) and is_token_list(p)) for p in pieces):
            return Mixed(pieces)
    raise BadBody(f"{name!r} holds a prompt that is neither text nor token ids", name)


def _with_suffix(part: Part, suffix: str) -> Part:
    if isinstance(part, Mixed):
        return Mixed((*part.pieces, suffix), SUFFIX_OVERHEAD)
    return Mixed((part, suffix), SUFFIX_OVERHEAD) if isinstance(part, str | list) else part


def _shape(body: Body, api: Api, parts: tuple[Part, ...], default_cap: int | None) -> Shape:
    fields = body.fields
    # Most bodies have none of these: one look for all of them, and no checks of each.
    if not _HIDING.isdisjoint(fields):
        _refuse_hidden(fields)
    is_chat = api is Api.CHAT
    stream = flag(fields, "stream")
    cap, cap_places = _caps(fields, is_chat=is_chat)
    return Shape(
        body,
        is_chat=is_chat,
        prompts=() if is_chat else tuple([part for part in parts if isinstance(part, str | list)]),
        output_cap=cap,
        choices=1 if _CHOICES.isdisjoint(fields) else choices_of(fields, *CHOICE_FIELDS),
        stream=stream,
        api=api,
        parts=parts,
        default_cap=default_cap,
        cap_places=cap_places,
        model=text_of(fields, "model"),
        stream_kind=StreamKind.SSE if stream else StreamKind.NONE,
    )


def _refuse_hidden(fields: Mapping[str, Any]) -> None:
    """Raise `BadBody` where the body's prompt is not the one that the engine would run."""
    refuse(fields, UNSEEN_PROMPTS, "cannot be priced; send the prompt itself")
    refuse_outliving(fields)
    if "prompt_token_ids" in object_of(fields, "kv_transfer_params"):
        raise BadBody("'kv_transfer_params.prompt_token_ids' hides the prompt", "kv_transfer_params")
    refuse(fields, ("session_params",), "cannot be priced: the session's earlier turns are at the engine")


def _caps(fields: Mapping[str, Any], *, is_chat: bool) -> tuple[int | None, tuple[CapPlace, ...]]:
    """The first cap that is set, and every place for one.

    A completion may ask for 0 tokens, to see its prompt echoed; engines run one token or none, so it
    is priced as 1 and goes on as 0. Not beside another cap: some engines take 0 for unset.
    """
    present = [name for name in CAP_FIELDS if name in fields]
    if not present:
        return None, _NO_CAP
    if present == ["max_tokens"]:  # the usual body
        own = cap_of(fields, "max_tokens", unset=(-1,), zero=not is_chat)
        return 1 if own == 0 else own, (CapPlace(("max_tokens",), own),)
    # -1 is llama.cpp's way to say unset.
    caps = [(name, cap_of(fields, name, unset=(-1,), zero=not is_chat)) for name in present]
    given = [(name, cap) for name, cap in caps if cap is not None]
    cap = given[0][1] if given else None
    if cap == 0 or len(given) > 1:
        zeros = [name for name, value in given if value == 0]
        if zeros and len(given) > 1:
            raise BadBody(f"{zeros[0]!r} is 0 and another cap is set; send one of them", zeros[0])
        cap = 1 if zeros else cap
    cap_places = tuple([CapPlace((name,), own) for name, own in caps])
    # A cap under a name that the engine does not know leaves it with its own default. Chats have
    # two names that engines know, and some refuse both at once.
    if "max_tokens" not in present and not (is_chat and "max_completion_tokens" in present):
        cap_places += (CapPlace(("max_tokens",), cap),)
    return cap, cap_places
