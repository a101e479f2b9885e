"""What a request may reach at worst, in the engine's own blocks.

Promise: the price is never below the blocks that the engine can come to hold for the request,
provided that the returned output cap is enforced on the engine. A pool without a `geometry` is taken
to have one full-attention group.
"""

from __future__ import annotations

from kvgate.core.records import Ask, CapRules, Misuse, PoolFacts, Price, Reason


def kv_bytes_per_token(
    num_layers: int, num_kv_heads: int, head_dim: int, bytes_per_element: float = 2
) -> int:
    """Bytes of KV cache that one token takes in a plain MHA/GQA model: K and V in every layer.

    Not for MLA (one shared latent, not doubled), sliding-window or hybrid models.
    """
    for name, value in (
        ("num_layers", num_layers),
        ("num_kv_heads", num_kv_heads),
        ("head_dim", head_dim),
        ("bytes_per_element", bytes_per_element),
    ):
        if value <= 0:
            raise Misuse(f"{name} must be above 0, got {value}")
    # bytes_per_element may be a fraction (4-bit caches); the product is what is stored.
    return int(2 * num_layers * num_kv_heads * head_dim * bytes_per_element)


def effective_output_cap(requested: int | None, prompt_tokens: int, context: int) -> int | None:
    """The most tokens that can be generated: `requested`, clamped to the rest of the context.

    Unset (`None`) means the rest of the context. Returns None for a prompt that fills the context.
    """
    if requested is not None and requested < 1:
        raise Misuse(f"an output cap must be at least 1, got {requested}")
    if prompt_tokens < 0:
        raise Misuse(f"prompt_tokens must not be negative, got {prompt_tokens}")
    rest = context - prompt_tokens
    if rest < 1:
        return None
    return rest if requested is None else min(requested, rest)


def blocks_for(prompt_tokens: int, output_cap: int, facts: PoolFacts) -> int:
    """Blocks that one sequence holds at its longest.

    `ceil((P + M - 1 + lookahead) / block_size)`: the last token is sampled but never stored, and
    nothing is stored beyond the engine's context. A pool of several groups is priced by its layout.
    """
    layout, limit = facts.geometry, facts.engine_context
    if layout is not None:
        # The pool may hold more lookahead than the layout knows of, never less.
        ahead = max(0, facts.lookahead - layout.lookahead)
        return layout.price(prompt_tokens, output_cap + ahead, limit)
    stored = prompt_tokens + output_cap - 1 + facts.lookahead
    if limit is not None and stored > limit:
        stored = limit
    return -(-max(stored, 1) // facts.block_size)


def requested_cap(output_cap: int | None, rules: CapRules) -> int | None:
    """The smallest of what the client set (or the operator's default) and the operator's ceiling."""
    cap = output_cap if output_cap is not None else rules.default
    if rules.ceiling is None:
        return cap
    return rules.ceiling if cap is None else min(cap, rules.ceiling)


def price(ask: Ask, facts: PoolFacts) -> Price | Reason:
    """The worst case of a request, or the reason why it can never be admitted."""
    prompts, choices = ask.prompts, ask.choices
    if not prompts or choices < 1:
        raise Misuse("a request has at least one prompt and one choice")
    requested = requested_cap(ask.output_cap, ask.rules)
    blocks = 0
    output_cap = 0
    for prompt_tokens in prompts:
        cap = effective_output_cap(requested, prompt_tokens, facts.context)
        if cap is None:
            return Reason.CONTEXT_LENGTH_EXCEEDED
        blocks += choices * blocks_for(prompt_tokens, cap, facts)
        # One cap is sent for all prompts; a longer prompt is bounded by the context itself.
        if cap > output_cap:
            output_cap = cap
    sequences = choices * len(prompts)
    if blocks > facts.most_blocks:
        return Reason.KV_CAPACITY_EXCEEDED
    if facts.max_seqs is not None and sequences > facts.max_seqs:
        return Reason.KV_CAPACITY_EXCEEDED
    return Price(blocks, sequences, output_cap)


def worst_case_blocks(ask: Ask, facts: PoolFacts) -> tuple[int, int | None]:
    """Blocks and cap of a request whether or not they fit: the figures a refusal shows."""
    requested = requested_cap(ask.output_cap, ask.rules)
    blocks = 0
    shown: int | None = None
    for prompt_tokens in ask.prompts:
        cap = effective_output_cap(requested, prompt_tokens, facts.context)
        blocks += ask.choices * blocks_for(prompt_tokens, cap or 1, facts)
        if cap is not None:
            shown = max(shown or 0, cap)
    return blocks, shown


def output_cap_that_fits(ask: Ask, facts: PoolFacts, free_blocks: int, free_seqs: int | None) -> int | None:
    """The largest output cap with which the request would fit into `free_blocks`, or None.

    Bounded by what the request could have in an empty context. Needs O(prompts x log context).
    """
    if free_seqs is not None and ask.choices * len(ask.prompts) > free_seqs:
        return None
    rest = facts.context - min(ask.prompts)
    if max(ask.prompts) >= facts.context:
        return None
    if ask.rules.ceiling is not None:
        rest = min(rest, ask.rules.ceiling)

    def cost(cap: int) -> int:
        return ask.choices * sum(blocks_for(p, min(cap, facts.context - p), facts) for p in ask.prompts)

    low, high = 0, rest
    while low < high:
        middle = (low + high + 1) // 2
        if cost(middle) <= free_blocks:
            low = middle
        else:
            high = middle - 1
    return low or None
