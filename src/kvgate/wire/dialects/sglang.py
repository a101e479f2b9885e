"""SGLang's `/generate`: texts or token ids, alone or in lists, with one or several sampling settings.

Promise: with a list of settings each keeps its own smaller cap, and the price is that of the largest.
"""

from __future__ import annotations

from typing import Any

from kvgate.wire.body import BadBody, Body
from kvgate.wire.dialects.fields import cap_of, choices_of, flag, object_of, objects_of, refuse, text_of
from kvgate.wire.dialects.openai import prompt_parts
from kvgate.wire.dialects.shape import Api, CapPlace, Part, RequestShape, StreamKind, Unseen

DEFAULT_CAP = 128
MEDIA = ("image_data", "audio_data", "video_data")


def read_sglang_generate(raw: bytes, *, default_cap: int | None = DEFAULT_CAP) -> RequestShape:
    """The shape of a `/generate` body. Raises `BadBody`."""
    body = Body(raw)
    fields = body.fields
    refuse(fields, ("input_embeds",), "cannot be priced; send the prompt itself")
    given = [name for name in ("text", "input_ids") if fields.get(name) is not None]
    if len(given) != 1:
        raise BadBody("send the prompt either as 'text' or as 'input_ids'", "text")
    parts: tuple[Part, ...] = prompt_parts(fields[given[0]], given[0])
    if any(fields.get(name) is not None for name in MEDIA):
        parts = (Unseen("the prompt holds images or audio"),) * len(parts)
    elif fields.get("session_params"):
        parts = (Unseen("the session's earlier turns are at the engine"),) * len(parts)
    is_list = isinstance(fields.get("sampling_params"), list)
    listed: list[dict[str, Any]]
    listed = objects_of(fields, "sampling_params") if is_list else [object_of(fields, "sampling_params")]
    if is_list and len(listed) != len(parts):
        raise BadBody("'sampling_params' must be one object, or one for each prompt", "sampling_params")
    caps, cap_places = [], []
    for index, params in enumerate(listed):
        cap = cap_of(params, "max_new_tokens", at="sampling_params.", zero=True)
        # Null is no limit; only an absent cap has the default.
        own = cap if "max_new_tokens" in params else (default_cap if is_list else None)
        caps.append(own)
        where: tuple[str | int, ...] = ("sampling_params", index) if is_list else ("sampling_params",)
        cap_places.append(CapPlace((*where, "max_new_tokens"), own))
    numbers = [cap for cap in caps if cap is not None]
    largest = max(1, *numbers) if len(numbers) == len(caps) else None
    is_default = not is_list and "max_new_tokens" not in listed[0]
    stream = flag(fields, "stream")
    return RequestShape(
        body,
        is_chat=False,
        prompts=tuple(part for part in parts if isinstance(part, str | list)),
        output_cap=largest,
        choices=max(choices_of(params, "n", at="sampling_params.") for params in listed),
        stream=stream,
        api=Api.SGLANG,
        parts=parts,
        default_cap=default_cap if is_default else None,
        cap_places=tuple(cap_places),
        model=text_of(fields, "model"),
        stream_kind=StreamKind.SSE if stream else StreamKind.NONE,
    )
