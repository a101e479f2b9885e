"""llama.cpp's pages -> its cache.

The size of the cache is on no page, and neither is whether it is unified: a slot's `n_ctx` is the
whole cache where it is, and a slot's own share where it is not. One slot's context is a bound that
holds either way, so that is used until the operator says what -c is (--total-blocks). Units are cells
of one token; sequences are slots.
"""

from __future__ import annotations

from kvgate.wire.engines.found import Pages, Reading
from kvgate.wire.engines.pages import inside, json_of, models_in, names_of, object_of, size

PATHS = ("/props", "/slots", "/v1/models")
ASK = "say what llama-server was started with as -c (--ctx-size): --total-blocks N"


def read(pages: Pages) -> Reading:
    """Everything that llama.cpp tells from outside."""
    found = Reading("llamacpp", block_size=1)
    found.sources["block_size"] = "llama.cpp counts in cells of one token"
    props = object_of(pages, "/props")
    entries = models_in(pages)
    found.models = names_of(entries)
    build = props.get("build_info")
    found.version = build if isinstance(build, str) else None
    slots = json_of(pages.get("/slots"))
    listed = [slot for slot in slots if isinstance(slot, dict)] if isinstance(slots, list) else []
    _slots(props, listed, found)
    words = [
        size(inside(props, "default_generation_settings", "n_ctx")),
        *(size(slot.get("n_ctx")) for slot in listed),
        *(size(inside(entry, "meta", "n_ctx")) for entry in entries[:1]),
    ]
    known = {word for word in words if word is not None}
    if known:
        found.read("context", min(known), "/props: n_ctx of a slot")
        found.engine_context = max(known)
        found.read("total_blocks", min(known), "a bound: one slot's context")
        _ask(found)
    else:
        found.why_unknown |= dict.fromkeys(("context", "total_blocks"), "/props tells no n_ctx")
    if len(known) > 1:
        found.warn(
            "context_differs",
            f"the pages tell several contexts ({', '.join(map(str, sorted(known)))}); the least is used",
            "give the right one with --context",
            doubts=True,
        )
    if listed:
        found.running = sum(slot.get("is_processing") is True for slot in listed)
    if any(slot.get("speculative") is True for slot in listed):
        found.unsafe(
            "speculation_unknown",
            "the slots decode speculatively; how many draft tokens they keep is on no page",
            "give what --draft-max (--spec-draft-n-max) is with --lookahead",
        )
    return found


def _slots(props: object, listed: list[dict[str, object]], found: Reading) -> None:
    told = size(inside(props, "total_slots"))
    counts = {count for count in (told, len(listed) or None) if count is not None}
    if counts:
        found.read("max_seqs", min(counts), "/props: total_slots")
    else:
        found.why_unknown["max_seqs"] = "/props tells no total_slots"
    if len(counts) > 1:
        found.warn(
            "slots_differ",
            f"/props tells {told} slots and /slots shows {len(listed)}; the fewer are used",
            "give the right number with --max-seqs",
            doubts=True,
        )


def _ask(found: Reading) -> None:
    """Both readings of one field, and what each would mean."""
    slots = found.max_seqs or 1
    if slots == 1 or found.context is None:
        found.is_exact = slots == 1
        return
    found.warn(
        "unified_or_split",
        f"{slots} slots of {found.context:,} tokens are one cache of {found.context:,} cells where it is "
        f"unified (the default), and {slots * found.context:,} where it is split (-np without --kv-unified); "
        "no page tells which. The smaller is used: safe, and wasteful if it is split",
        f"{ASK}. If it is unified, one overflow ends every stream, so let nothing reach it but kvgate",
    )


def judge(found: Reading, cells: int) -> None:
    """What the operator's -c means beside the slots."""
    slots, context = found.max_seqs or 1, found.context or cells
    if slots == 1:
        return
    if cells < slots * context:
        found.warn(
            "unified_cache",
            f"{slots} slots share {cells:,} cells: one overflow ends every running stream",
            "let nothing reach the engine but kvgate, or split the cache: start with -np and without "
            "--kv-unified",
        )
    elif cells > slots * context:
        found.warn(
            "cells_above_slots",
            f"{cells:,} cells are more than {slots} slots of {context:,} tokens can use",
            "give what llama-server was started with as -c (--ctx-size)",
        )
