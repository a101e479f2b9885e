"""Public: `vllm serve MODEL --middleware kvgate.vllm.Middleware` (docs/fronts.md). The code is in
`edge.asgi.vllm`."""

from kvgate.edge.asgi.vllm import Middleware

__all__ = ["Middleware"]
