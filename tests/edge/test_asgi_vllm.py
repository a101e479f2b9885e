"""The middleware inside vLLM, before an application that has the state of vLLM's server."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from kvgate.core.price import blocks_for
from kvgate.edge.asgi.vllm_sizes import UnknownPool, pool_of
from kvgate.vllm import Middleware

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
}
GEMMA = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "hidden_size": 640,
    "sliding_window": 512,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
}
NEW = {"model_type": "never_heard_of", "architectures": ["NeverHeardOf"], "sliding_window": 99}


class Cache(SimpleNamespace):
    """`vllm.config.CacheConfig`, once the engine has filled it in: 1,000 blocks of 16."""

    def __init__(self, groups: int = 1, **other: Any) -> None:
        # One group: 1,000 blocks hold 1,000 / 256 requests of 4,096 tokens.
        concurrency = 1000 / 256 if groups == 1 else 1000 / 300
        super().__init__(
            **{
                "block_size": 16,
                "num_gpu_blocks": 1000,
                "cache_dtype": "auto",
                "enable_prefix_caching": True,
                "is_attention_free": False,
                "kv_cache_size_tokens": int(concurrency * 4096),
                "kv_cache_max_concurrency": concurrency,
                "cpu_kvcache_space_bytes": None,
                "kv_cache_memory": 'a "quoted\\ thing"\n',
            }
            | other
        )


def config(model: dict[str, Any], cache: Cache | None = None, *, drafts: int = 0, ranks: int = 1) -> Any:
    return SimpleNamespace(
        cache_config=cache or Cache(),
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=lambda: dict(model)), max_model_len=4096
        ),
        parallel_config=SimpleNamespace(
            data_parallel_size=ranks,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
        ),
        scheduler_config=SimpleNamespace(
            max_num_seqs=32, max_num_batched_tokens=2048, disable_hybrid_kv_cache_manager=False
        ),
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts) if drafts else None,
    )


def test_one_group_is_priced_without_its_geometry_whatever_the_cache_type() -> None:
    for model, dtype in ((LLAMA, "auto"), (LLAMA, "turboquant_4bit_nc"), (NEW, "fp8_inc")):
        facts, said = pool_of(config(model, Cache(cache_dtype=dtype)), 0.9)
        # Block 0 is the engine's null block.
        assert (facts.total_blocks, facts.block_size, facts.context) == (999, 16, 4096)
        assert (facts.max_seqs, facts.lookahead, facts.geometry, said) == (32, 0, None, [])


def test_several_groups_are_priced_by_the_geometry_and_the_type_by_name() -> None:
    for dtype in ("auto", "fp8", "fp8_e4m3", "int4_per_token_head"):
        facts, _ = pool_of(config(GEMMA, Cache(2, cache_dtype=dtype)), 0.9)
        assert facts.geometry is not None, dtype
    with pytest.raises(UnknownPool, match="'turboquant_4bit_nc' is not known"):
        pool_of(config(GEMMA, Cache(2, cache_dtype="turboquant_4bit_nc")), 0.9)


def test_drafts_are_in_the_price() -> None:
    plain, _ = pool_of(config(LLAMA), 0.9)
    drafting, _ = pool_of(config(LLAMA, drafts=3), 0.9)
    assert blocks_for(16, 1, plain) == 1
    assert blocks_for(16, 1, drafting) > 1


def test_of_several_ranks_one_is_taken() -> None:
    cache = Cache(num_gpu_blocks=4000)
    facts, said = pool_of(config(LLAMA, cache, ranks=4), 0.9)
    assert facts.total_blocks == 999
    assert "several_ranks" in {finding.code for finding in said}


# --- the server


class Server:
    """vLLM's application with its state, and what it was asked."""

    def __init__(self, vllm_config: Any = None) -> None:
        self.state = SimpleNamespace(args=SimpleNamespace(api_key=None, api_server_count=None))
        if vllm_config is not None:
            self.state.vllm_config = vllm_config
        self.asked: list[str] = []
        self.gate = Middleware(self.app)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            return
        self.asked.append(scope["path"])
        body = b'{"count": 5}' if scope["path"] == "/tokenize" else b"{}"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def ask(self, path: str, body: bytes = b"", method: str = "POST") -> tuple[int, bytes]:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode()}
        await self.gate(
            scope | {"headers": [], "query_string": b"", "root_path": "", "app": self}, receive, send
        )
        return sent[0]["status"], sent[1]["body"]

    async def start(self) -> Any:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "lifespan.startup"}

        async def send(message: Any) -> None:
            sent.append(message)

        await self.gate({"type": "lifespan", "app": self}, receive, send)
        return sent[0]


UNKNOWN = config(NEW, Cache(2))
COMPLETION = json.dumps({"model": "m", "prompt": "hello", "max_tokens": 20}).encode()


async def test_a_server_whose_requests_cannot_be_priced_does_not_start_and_says_why() -> None:
    answer = await Server(UNKNOWN).start()
    assert answer["type"] == "lifespan.startup.failed"
    assert "cannot tell what a request of this model holds" in answer["message"]
    assert "never_heard_of" in answer["message"]
    assert "kvgate serve" in answer["message"]


@pytest.mark.parametrize("state", [UNKNOWN, SimpleNamespace(), None])
async def test_where_it_serves_all_the_same_what_generates_gets_503_and_health_its_answer(state: Any) -> None:
    server = Server(state)
    status, body = await server.ask("/v1/completions", COMPLETION)
    error = json.loads(body)["error"]
    assert (status, error["code"]) == (503, "engine_unavailable")
    assert "kvgate" in error["message"]
    assert (await server.ask("/health", method="GET"))[0] == 200
    assert (await server.ask("/tokenize", b"{}"))[0] == 200
    status, body = await server.ask("/v1/audio/transcriptions", b"{}")
    assert (status, b"KVGATE_ALLOW_PATH" in body) == (403, True)
    assert server.asked == ["/health", "/tokenize"]


async def test_a_server_that_can_be_priced_starts_and_counts_by_its_own_endpoint() -> None:
    server = Server(config(LLAMA))
    assert (await server.start())["type"] == "lifespan.startup.complete"
    assert await server.ask("/v1/completions", COMPLETION) == (200, b"{}")
    assert server.asked == ["/tokenize", "/v1/completions"]
