"""The client half: httpx transports, and OpenAI and Anthropic clients, that come back when told to.

    from kvgate.client import Retries, openai_client

    client = openai_client(base_url="http://127.0.0.1:8080/v1", retries=Retries(shrink_cap=True))

Needs `pip install kvgate[client]`. docs/clients.md has the rules and more recipes.
"""

from __future__ import annotations

from kvgate.edge.client.sdks import (
    anthropic_client,
    async_anthropic_client,
    async_openai_client,
    openai_client,
)
from kvgate.edge.client.transport import AsyncRetryTransport, Retries, RetryTransport

__all__ = [
    "AsyncRetryTransport",
    "Retries",
    "RetryTransport",
    "anthropic_client",
    "async_anthropic_client",
    "async_openai_client",
    "openai_client",
]
