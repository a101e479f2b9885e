"""OpenAI's and Anthropic's clients with our patience instead of theirs.

Their own libraries try twice more and add no spread of their own to a named moment; here they get a
transport that waits as told for as long as `Retries` says, and `max_retries=0` so that nothing is
retried twice over. Everything else is theirs: pass their options by name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvgate.edge.client.transport import PATIENT, AsyncRetryTransport, Retries, RetryTransport

if TYPE_CHECKING:
    import anthropic
    import openai


def openai_client(*, retries: Retries = PATIENT, **options: Any) -> openai.OpenAI:
    """`openai.OpenAI(**options)` that comes back when told to. Needs the `openai` package."""
    import openai

    return openai.OpenAI(
        http_client=_http_client(openai.DefaultHttpxClient, retries), max_retries=0, **options
    )


def async_openai_client(*, retries: Retries = PATIENT, **options: Any) -> openai.AsyncOpenAI:
    """`openai.AsyncOpenAI(**options)` that comes back when told to."""
    import openai

    http_client = _http_client(openai.DefaultAsyncHttpxClient, retries)
    return openai.AsyncOpenAI(http_client=http_client, max_retries=0, **options)


def anthropic_client(*, retries: Retries = PATIENT, **options: Any) -> anthropic.Anthropic:
    """`anthropic.Anthropic(**options)` that comes back when told to. Needs the `anthropic` package."""
    import anthropic

    return anthropic.Anthropic(
        http_client=_http_client(anthropic.DefaultHttpxClient, retries), max_retries=0, **options
    )


def async_anthropic_client(*, retries: Retries = PATIENT, **options: Any) -> anthropic.AsyncAnthropic:
    """`anthropic.AsyncAnthropic(**options)` that comes back when told to."""
    import anthropic

    http_client = _http_client(anthropic.DefaultAsyncHttpxClient, retries)
    return anthropic.AsyncAnthropic(http_client=http_client, max_retries=0, **options)


def _http_client(kind: Any, retries: Retries) -> Any:
    """The SDK's own kind of HTTP client (its time-outs and limits), with our transport in it."""
    # Old versions stand on httpx, new ones on httpx2; a transport must be of the same family.
    names = {base.__name__: base.__module__.partition(".")[0] for base in kind.__mro__}
    if "AsyncClient" in names:
        family = importlib.import_module(names["AsyncClient"])
        return kind(transport=AsyncRetryTransport(family.AsyncHTTPTransport(), retries=retries))
    family = importlib.import_module(names["Client"])
    return kind(transport=RetryTransport(family.HTTPTransport(), retries=retries))
