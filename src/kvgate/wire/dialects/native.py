"""The engines' own generating endpoints whose cap stands at the top of the body or in one object.

vLLM's token-in endpoint, llama.cpp's completion and infill, TGI's and LMDeploy's generate. Each
promises what `openai` promises: the shape bounds what the engine can hold.
"""

from __future__ import annotations

from typing import Any

from kvgate.wire.body import BadBody, Body
from kvgate.wire.dialects.fields import (
    below,
    cap_of,
    choices_of,
    flag,
    needed_text,
    object_of,
    objects_of,
    places,
    refuse,
    refuse_outliving,
    text_of,
    tokens_of,
)
from kvgate.wire.dialects.openai import prompt_parts
from kvgate.wire.dialects.shape import Api, CapPlace, Mixed, Part, RequestShape, StreamKind, Unseen

# Tokens that a fill-in-the-middle prompt has besides its texts: markers, and a name for each file.
INFILL_OVERHEAD = 16
INFILL_FILE_OVERHEAD = 16


def read_vllm_generate(raw: bytes, *, default_cap: int | None = 16) -> RequestShape:
    """vLLM's `/inference/v1/generate`: token ids and `sampling_params`. Raises `BadBody`."""
    body = Body(raw)
    fields = body.fields
    part: Part = tokens_of(fields, "token_ids")
    if fields.get("features") is not None or fields.get("content_parts") is not None:
        part = Unseen("the prompt holds images or audio")
    params = object_of(fields, "sampling_params")
    at = "sampling_params."
    cap = cap_of(params, "max_tokens", at=at)
    default = None if "max_tokens" in params else default_cap
    choices = choices_of(params, "n", "best_of", at=at)
    cap_places = below(
        ("sampling_params",), places(params, ("max_tokens",), "max_tokens", {"max_tokens": cap})
    )
    return _shape(body, Api.VLLM, (part,), cap, default, choices, cap_places, flag(fields, "stream"))


def read_llamacpp_completion(raw: bytes, *, default_cap: int | None = None) -> RequestShape:
    """llama.cpp's `/completion`: prompts of texts and token ids, `n_predict`. Raises `BadBody`."""
    body = Body(raw)
    parts = prompt_parts(body.fields.get("prompt"), mixed=True)
    return _llamacpp(body, parts, default_cap)


def read_llamacpp_infill(raw: bytes, *, default_cap: int | None = None) -> RequestShape:
    """llama.cpp's `/infill`: prefix, suffix, prompt and other files make one prompt. Raises `BadBody`."""
    body = Body(raw)
    fields = body.fields
    pieces: list[str | list[int]] = [needed_text(fields, "input_prefix"), needed_text(fields, "input_suffix")]
    for part in prompt_parts(fields["prompt"], mixed=True) if fields.get("prompt") not in (None, "") else ():
        if not isinstance(part, str | list):
            raise BadBody("'prompt' must be a text or token ids", "prompt")
        pieces.append(part)
    files = objects_of(fields, "input_extra")
    for file in files:
        pieces += [
            text_of(file, "filename", "input_extra.") or "",
            text_of(file, "text", "input_extra.") or "",
        ]
    overhead = INFILL_OVERHEAD + INFILL_FILE_OVERHEAD * len(files)
    return _llamacpp(body, (Mixed(tuple(pieces), overhead),), default_cap)


def _llamacpp(body: Body, parts: tuple[Part, ...], default_cap: int | None) -> RequestShape:
    fields = body.fields
    names = ("n_predict", "max_completion_tokens", "max_tokens")
    # -1 means no limit; 0 reads the prompt into the cache and generates nothing.
    caps = {name: cap_of(fields, name, unset=(-1,), zero=True) for name in names}
    given = {name: cap for name, cap in caps.items() if cap is not None}
    # The engine's order among the names has changed between versions: the largest is safe.
    cap = max(1, *given.values()) if given else None
    cap_places = places(fields, names, "n_predict", given)
    choices = choices_of(fields, "n_cmpl", "n")
    return _shape(body, Api.LLAMACPP, parts, cap, default_cap, choices, cap_places, flag(fields, "stream"))


def read_tgi(raw: bytes, *, default_cap: int | None = None, stream: bool | None = None) -> RequestShape:
    """TGI's `/generate`, `/generate_stream` and `/`: `inputs` and `parameters`. Raises `BadBody`.

    `stream`: what the path says; None where the body says it.
    """
    body = Body(raw)
    text = needed_text(body.fields, "inputs")
    # Vision models find images in the text, as Markdown.
    part: Part = Unseen("the text holds an image") if "![](" in text else text
    params = object_of(body.fields, "parameters")
    at = "parameters."
    cap = cap_of(params, "max_new_tokens", at=at)
    own: dict[str, int | None] = {"max_new_tokens": cap}
    cap_places = below(("parameters",), places(params, ("max_new_tokens",), "max_new_tokens", own))
    streams = flag(body.fields, "stream") if stream is None else stream
    choices = choices_of(params, "best_of", at=at)
    return _shape(body, Api.TGI, (part,), cap, default_cap, choices, cap_places, streams)


def read_lmdeploy_generate(raw: bytes, *, default_cap: int | None = 128) -> RequestShape:
    """LMDeploy's `/generate`: `prompt` or `input_ids`, `max_tokens`. Raises `BadBody`."""
    body = Body(raw)
    fields = body.fields
    part: Part = (
        tokens_of(fields, "input_ids")
        if fields.get("input_ids") is not None
        else needed_text(fields, "prompt")
    )
    if fields.get("image_data") is not None:
        part = Unseen("the prompt holds images")
    elif fields.get("session_id") not in (None, -1):
        part = Unseen("the session's earlier turns are at the engine")
    cap = cap_of(fields, "max_tokens")
    cap_places = places(fields, ("max_tokens",), "max_tokens", {"max_tokens": cap})
    return _shape(body, Api.LMDEPLOY, (part,), cap, default_cap, 1, cap_places, flag(fields, "stream"))


def _shape(
    body: Body,
    api: Api,
    parts: tuple[Part, ...],
    cap: int | None,
    default_cap: int | None,
    choices: int,
    cap_places: tuple[CapPlace, ...],
    stream: bool,
) -> RequestShape:
    refuse(body.fields, ("prompt_embeds", "input_embeds"), "cannot be priced; send the prompt itself")
    refuse_outliving(body.fields)
    model: Any = body.fields.get("model")
    return RequestShape(
        body,
        is_chat=False,
        prompts=tuple(part for part in parts if isinstance(part, str | list)),
        output_cap=cap,
        choices=choices,
        stream=stream,
        api=api,
        parts=parts,
        default_cap=default_cap,
        cap_places=cap_places,
        model=model if isinstance(model, str) else None,
        stream_kind=StreamKind.SSE if stream else StreamKind.NONE,
    )
