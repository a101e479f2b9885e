"""The pool of a server, from what its owner knows: blocks, bytes, or the model's configuration.

Promises: sizes are rounded down; nothing is guessed. Errors name what is missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvgate.core.geometry import Serving, from_config
from kvgate.core.geometry.capacity import capacity
from kvgate.core.records import Misuse, PoolFacts


def pool_of_memory(
    kv_bytes: int,
    bytes_per_token: int,
    context: int,
    *,
    max_seqs: int | None = None,
    safety_fraction: float = 0.9,
) -> PoolFacts:
    """A pool of `kv_bytes` of KV cache, where a token takes `bytes_per_token` (`kv_bytes_per_token`).

    `context`: the most tokens that a sequence may reach. Raises `Misuse`.
    """
    if bytes_per_token < 1:
        raise Misuse(f"bytes_per_token must be at least 1, got {bytes_per_token}")
    tokens = kv_bytes // bytes_per_token
    if tokens < 1:
        raise Misuse(f"{kv_bytes} bytes hold no token of {bytes_per_token} bytes")
    return PoolFacts(tokens, 1, context, max_seqs, safety_fraction)


def pool_of_model(
    config: Mapping[str, Any] | str | Path,
    kv_bytes: int,
    *,
    context: int | None = None,
    serving: Serving | None = None,
    max_seqs: int | None = None,
    safety_fraction: float = 0.9,
) -> PoolFacts:
    """The pool that `kv_bytes` make for the model of a `config.json` (its content, path or folder).

    Windows, states and latents are priced as vLLM lays them out (see docs/planning.md). `serving`: how
    the engine is started. Raises `UnknownGeometry`, `OSError` or `ValueError`.
    """
    if not isinstance(config, Mapping):
        path = Path(config)
        found_file: dict[str, Any] = json.loads(
            (path / "config.json" if path.is_dir() else path).read_text("utf-8")
        )
        config = found_file
    serving = serving or Serving()
    found = capacity(from_config(config), serving, kv_bytes, context)
    return PoolFacts(
        found.total_blocks,
        found.layout.block_size,
        found.context,
        max_seqs,
        safety_fraction,
        geometry=found.layout,
        engine_context=found.context,
    )
