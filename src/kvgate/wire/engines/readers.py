"""Which pages each engine is read from, and how an engine is told by its pages. No I/O: paths only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvgate.wire.engines import read_llamacpp, read_others, read_sglang, read_vllm
from kvgate.wire.engines.found import Pages, Reading
from kvgate.wire.engines.pages import models_in, object_of


@dataclass(frozen=True, slots=True)
class Reader:
    """`paths`: what to GET, in order; `instead_of`: paths that are asked only where another failed.
    `guarded`: a path that an API key, where there is one, protects."""

    read: Callable[[Pages], Reading]
    paths: tuple[str, ...]
    guarded: str | None
    instead_of: Mapping[str, str] = field(default_factory=dict)


READERS: dict[str, Reader] = {
    "vllm": Reader(read_vllm.read, read_vllm.PATHS, "/v1/models"),
    "sglang": Reader(read_sglang.read, read_sglang.PATHS, "/v1/models", {"/get_server_info": "/server_info"}),
    "llamacpp": Reader(read_llamacpp.read, read_llamacpp.PATHS, "/props"),
    "tgi": Reader(read_others.read_tgi, read_others.TGI_PATHS, "/info"),
    "tensorrt-llm": Reader(read_others.read_tensorrt_llm, read_others.TENSORRT_LLM_PATHS, None),
    "lmdeploy": Reader(read_others.read_lmdeploy, read_others.LMDEPLOY_PATHS, "/v1/models"),
    "ollama": Reader(read_others.read_ollama, read_others.OLLAMA_PATHS, None),
    "generic": Reader(read_others.read_generic, read_others.GENERIC_PATHS, None),
}

# How each engine signs its list of models. Ollama writes a library's name there and is known by its
# own pages.
OWNERS = {
    "vllm": "vllm",
    "sglang": "sglang",
    "llamacpp": "llamacpp",
    "tensorrt_llm": "tensorrt-llm",
    "lmdeploy": "lmdeploy",
}
# Asked where the list of models is not signed; none of them changes anything at any engine.
SIGNS = ("/props", "/server_info", "/get_server_info", "/info", "/api/version")


def signed(pages: Pages) -> str | None:
    """The engine that signed its list of models."""
    owners = {entry.get("owned_by") for entry in models_in(pages)}
    known = {OWNERS[owner] for owner in owners if isinstance(owner, str) and owner in OWNERS}
    return known.pop() if len(known) == 1 else None


def recognised(pages: Pages) -> tuple[str, ...]:
    """The engines whose own pages are there: one, none, or too many to tell."""
    engine = signed(pages)
    if engine is not None:
        return (engine,)
    props, info = object_of(pages, "/props"), object_of(pages, "/info")
    server = object_of(pages, "/server_info") or object_of(pages, "/get_server_info")
    signs = {
        "llamacpp": "default_generation_settings" in props and "total_slots" in props,
        "sglang": "max_total_num_tokens" in server or "internal_states" in server,
        "tgi": "model_id" in info and "max_total_tokens" in info,
        "ollama": "version" in object_of(pages, "/api/version"),
    }
    return tuple(name for name, is_there in signs.items() if is_there)
