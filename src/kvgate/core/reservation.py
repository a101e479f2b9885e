"""What one request of a plain model may hold at worst, in tokens and in bytes: the classic formulas.

Promise: never below what an engine comes to hold, if the output cap is enforced on it. One token
above what it stores, since the last one is sampled and not kept; `price` counts to the block.
"""

from __future__ import annotations

from kvgate.core.records import Misuse


def request_reservation_tokens(prompt_tokens: int, output_cap: int) -> int:
    """Tokens that a request may reach: its prompt and every token that it may generate.

    `output_cap` is the effective cap (see `effective_output_cap`), at least 1. Raises `Misuse`.
    """
    if prompt_tokens < 0:
        raise Misuse(f"prompt_tokens must not be negative, got {prompt_tokens}")
    if output_cap < 1:
        raise Misuse(f"an output cap must be at least 1, got {output_cap}")
    return prompt_tokens + output_cap


def request_reservation_bytes(prompt_tokens: int, output_cap: int, per_token_bytes: int) -> int:
    """Bytes of KV cache that a request may reach; `per_token_bytes` as of `kv_bytes_per_token`.

    Raises `Misuse`.
    """
    if per_token_bytes < 1:
        raise Misuse(f"per_token_bytes must be at least 1, got {per_token_bytes}")
    return request_reservation_tokens(prompt_tokens, output_cap) * per_token_bytes
