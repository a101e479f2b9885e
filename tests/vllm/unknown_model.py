"""`--middleware unknown_model.Middleware`: kvgate's, with a model that it has never heard of."""

from __future__ import annotations

from typing import Any

from kvgate import vllm


class Middleware(vllm.Middleware):
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        config = scope["app"].state.vllm_config
        # As with several KV groups, and with an architecture that came after kvgate.
        config.cache_config.kv_cache_size_tokens = 1
        config.model_config.hf_config.to_dict = lambda: {"model_type": "later", "sliding_window": 99}
        await super().__call__(scope, receive, send)
