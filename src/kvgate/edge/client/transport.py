"""httpx transports that come back when they are told to: `httpx.Client(transport=RetryTransport())`.

Promises: a moment that the server names is never undercut; without one the wait is exponential with
full jitter; `x-should-retry: false` is final; the last answer is handed on as it came. Only answers
that begin with an error status are tried again: once a good head is there, a stream is the caller's,
so no token is ever delivered twice. All tries carry one `Idempotency-Key`, by which kvgate knows them
and keeps their place.

tenacity decides when to stop and how long to wait: unlike stamina, which wraps it, it can retry on
results (a transport returns a refusal, it does not raise it), and its sleep can be replaced in tests.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tenacity

from kvgate.edge.client.advice import Advice, advice, cap_that_fits, with_cap

if TYPE_CHECKING:
    import httpx

RETRY_COUNT = "x-stainless-retry-count"
BACKOFF_FIRST, BACKOFF_MAX = 0.5, 30.0
# Added to a moment that many clients may have been given: up to a tenth, never subtracted.
SPREAD = 0.1
_NOT_SENT = ("ConnectError", "ConnectTimeout", "PoolTimeout")


@dataclass(frozen=True, slots=True)
class Retries:
    """How patient a client is.

    `tries`: requests in all. `patience`: seconds after which no further wait begins (a named moment
    beyond it is not waited for). `shrink_cap`: a request refused for room is sent again at once with the
    cap that fits now, if that is at least `smallest_cap` tokens; it is refused again only when somebody
    was faster, and then waits as told, with its own cap.
    """

    tries: int = 10
    patience: float = 180.0
    shrink_cap: bool = False
    smallest_cap: int = 256

    def __post_init__(self) -> None:
        if self.tries < 1 or self.patience < 0 or self.smallest_cap < 1:
            raise ValueError("tries and smallest_cap must be at least 1, patience at least 0")


PATIENT = Retries()


class _Job:
    """One request through all its tries; what a sync and an async transport have in common."""

    def __init__(self, request: Any, retries: Retries) -> None:
        self._request, self._retries, self._sent = request, retries, 0
        if "idempotency-key" not in request.headers:
            request.headers["Idempotency-Key"] = f"kvgate-{uuid.uuid4()}"

    def next(self) -> Any:
        """The request of the next try."""
        return self._counted(self._request)

    def may_shrink(self, response: Any) -> bool:
        """Whether the body of this answer must be read, because it may name a cap that fits."""
        return self._retries.shrink_cap and response.status_code in (429, 503, 529)

    def smaller(self, response: Any) -> Any:
        """The request with the cap that would be admitted now; None where that is no help."""
        fits = cap_that_fits(response.content)
        if fits is None or fits < self._retries.smallest_cap:
            return None
        old = self._request
        body = with_cap(old.content, old.url.path, fits)
        if body is None:
            return None
        headers = [(k, v) for k, v in old.headers.multi_items() if k.lower() != "content-length"]
        return self._counted(
            type(old)(old.method, old.url, headers=headers, content=body, extensions=old.extensions)
        )

    def _counted(self, request: Any) -> Any:
        if self._sent:
            request.headers[RETRY_COUNT] = str(self._sent)
        self._sent += 1
        return request


def _advice(state: tenacity.RetryCallState) -> Advice:
    """Of the try that has just ended: an answer, or an error before anything was sent."""
    assert state.outcome is not None
    if state.outcome.failed:
        # By name: httpx and httpx2 have classes of their own.
        error = state.outcome.exception()
        return Advice(type(error).__name__ in _NOT_SENT)
    response = state.outcome.result()
    return advice(response.status_code, response.headers, time.time())


def _wait(state: tenacity.RetryCallState) -> float:
    said = _advice(state)
    if said.wait is None:
        return random.uniform(0.0, min(BACKOFF_MAX, BACKOFF_FIRST * 2**state.attempt_number))
    return said.wait if said.is_slot else said.wait * (1 + random.uniform(0.0, SPREAD))


def _options(retries: Retries) -> dict[str, Any]:
    return {
        "stop": tenacity.stop_after_attempt(retries.tries) | tenacity.stop_before_delay(retries.patience),
        "wait": _wait,
        "retry": lambda state: _advice(state).again,
        # Out of tries: the last answer, or the last error.
        "retry_error_callback": lambda state: state.outcome.result(),
    }


class RetryTransport:
    """For `httpx.Client(transport=...)`, and for httpx2's. `wrapped`: what sends; httpx's own if None.

    Raises what `wrapped` raises, once tries and patience are used up.
    """

    def __init__(
        self, wrapped: httpx.BaseTransport | Any = None, *, retries: Retries = PATIENT, **options: Any
    ) -> None:
        if wrapped is None:
            import httpx

            wrapped = httpx.HTTPTransport(**options)
        elif options:
            raise TypeError("options are for httpx's own transport, and one was given")
        self._wrapped, self.retries = wrapped, retries
        self.sleep = time.sleep

    def handle_request(self, request: Any) -> Any:
        """Send, and send again as told. A body that can be read only once is kept in memory."""
        request.read()
        job = _Job(request, self.retries)

        def attempt() -> Any:
            response = self._wrapped.handle_request(job.next())
            if not job.may_shrink(response):
                return response
            response.read()
            smaller = job.smaller(response)
            if smaller is None:
                return response
            response.close()
            return self._wrapped.handle_request(smaller)

        def leave(state: tenacity.RetryCallState) -> None:
            if state.outcome is not None and not state.outcome.failed:
                refused = state.outcome.result()
                refused.read()  # small; the connection can be used again
                refused.close()

        again = tenacity.Retrying(sleep=self.sleep, before_sleep=leave, **_options(self.retries))
        return again(attempt)

    def close(self) -> None:
        self._wrapped.close()

    def __enter__(self) -> RetryTransport:
        self._wrapped.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._wrapped.__exit__(*error)


class AsyncRetryTransport:
    """`RetryTransport` for `httpx.AsyncClient` on asyncio. Cancelling it ends the wait at once."""

    def __init__(
        self, wrapped: httpx.AsyncBaseTransport | Any = None, *, retries: Retries = PATIENT, **options: Any
    ) -> None:
        if wrapped is None:
            import httpx

            wrapped = httpx.AsyncHTTPTransport(**options)
        elif options:
            raise TypeError("options are for httpx's own transport, and one was given")
        self._wrapped, self.retries = wrapped, retries
        self.sleep: Any = asyncio.sleep

    async def handle_async_request(self, request: Any) -> Any:
        await request.aread()
        job = _Job(request, self.retries)

        async def attempt() -> Any:
            response = await self._wrapped.handle_async_request(job.next())
            if not job.may_shrink(response):
                return response
            await response.aread()
            smaller = job.smaller(response)
            if smaller is None:
                return response
            await response.aclose()
            return await self._wrapped.handle_async_request(smaller)

        async def leave(state: tenacity.RetryCallState) -> None:
            if state.outcome is not None and not state.outcome.failed:
                refused = state.outcome.result()
                await refused.aread()
                await refused.aclose()

        again = tenacity.AsyncRetrying(sleep=self.sleep, before_sleep=leave, **_options(self.retries))
        return await again(attempt)

    async def aclose(self) -> None:
        await self._wrapped.aclose()

    async def __aenter__(self) -> AsyncRetryTransport:
        await self._wrapped.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._wrapped.__aexit__(*error)
