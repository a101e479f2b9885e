"""The gate around your own generate call: START HERE to use kvgate as a library.

    admission = Admission.from_blocks(total_blocks=4096, block_size=16, context=8192)

    async with admission.admit(prompt_tokens=70, max_tokens=600, max_wait=10) as ticket:
        answer = await generate(prompt, max_tokens=ticket.output_cap)

Promises: inside the block the reservation is held, after it given back, however the block is left;
a cancellation at any await, in the line or in the block, leaves nothing reserved, for there is no
await between being granted and owning, nor in giving back; what is not admitted raises
`AdmissionRefused`. Works in asyncio and trio (so with anyio), in threads, and in all of them at once
on one pool. The cap on the ticket must be enforced on the engine. Standard library only.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from kvgate.core.gate import LINE_LIMIT, Gate
from kvgate.core.geometry import Serving
from kvgate.core.policy import Policy, worst_case
from kvgate.core.records import ANYONE, Ask, CapRules, Granted, Misuse, PoolFacts, Reason, Seconds, Tenant
from kvgate.edge import clock
from kvgate.edge.library.admitting import AsyncAdmitting, Entry, ThreadAdmitting
from kvgate.edge.library.capacity import pool_of_memory, pool_of_model
from kvgate.edge.library.ticket import AdmissionRefused
from kvgate.edge.library.turnstile import Turnstile

R = TypeVar("R")

Size = int | tuple[int, int | None]
"""Prompt tokens, or (prompt tokens, output cap)."""


class _Front:
    """What the two admissions share: the pool, its rules, its figures."""

    def __init__(
        self,
        facts: PoolFacts,
        *,
        rules: CapRules | None = None,
        policy: Policy = worst_case,
        line_limit: int = LINE_LIMIT,
        floors: Mapping[int, float] | None = None,
        abort_grace: Seconds = 0.0,
        busy_status: int = 429,
    ) -> None:
        """`rules`: the operator's own limits on output caps. `line_limit`: the most who may wait.

        `abort_grace`: seconds for which the room of a block left with an error stays held, for an
        engine that goes on after its caller has gone. `busy_status`: of refusals as HTTP.
        """
        self._turnstile = Turnstile(Gate(facts, policy=policy, line_limit=line_limit, floors=floors))
        self.rules = rules or CapRules()
        self.abort_grace = abort_grace
        self.busy_status = busy_status

    @classmethod
    def from_blocks(
        cls,
        total_blocks: int,
        block_size: int,
        context: int,
        *,
        max_seqs: int | None = None,
        safety_fraction: float = 0.9,
        **options: Any,
    ) -> Self:
        """A pool of blocks of `block_size` tokens; `options` as of the constructor. Raises `Misuse`."""
        return cls(PoolFacts(total_blocks, block_size, context, max_seqs, safety_fraction), **options)

    @classmethod
    def from_memory(
        cls,
        kv_bytes: int,
        bytes_per_token: int,
        context: int,
        *,
        max_seqs: int | None = None,
        safety_fraction: float = 0.9,
        **options: Any,
    ) -> Self:
        """A pool of `kv_bytes`, a token taking `bytes_per_token` (`kv_bytes_per_token`). Raises `Misuse`."""
        facts = pool_of_memory(
            kv_bytes, bytes_per_token, context, max_seqs=max_seqs, safety_fraction=safety_fraction
        )
        return cls(facts, **options)

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any] | str | Path,
        kv_bytes: int,
        *,
        context: int | None = None,
        serving: Serving | None = None,
        max_seqs: int | None = None,
        safety_fraction: float = 0.9,
        **options: Any,
    ) -> Self:
        """The pool that `kv_bytes` make for the model of a `config.json` (content, path or folder).

        Raises `UnknownGeometry` for a model that cannot be priced.
        """
        facts = pool_of_model(
            config,
            kv_bytes,
            context=context,
            serving=serving,
            max_seqs=max_seqs,
            safety_fraction=safety_fraction,
        )
        return cls(facts, **options)

    @property
    def facts(self) -> PoolFacts:
        """The pool as it is now."""
        return self._turnstile.gate.facts

    def resize(self, facts: PoolFacts) -> None:
        """The engine has other sizes now. What is held stays held."""
        self._turnstile.resize(facts)

    def snapshot(self) -> dict[str, int]:
        """The books at this moment: usable, reserved and free blocks, live and waiting requests."""
        return self._turnstile.figures()

    def explain(self, prompt_tokens: int | Iterable[int], max_tokens: int | None = None, n: int = 1) -> str:
        """One sentence on what such a request would be told now. Reserves nothing."""
        given = self._turnstile.explain(self._ask(prompt_tokens, max_tokens, n, 0.0, ANYONE, 0))
        if isinstance(given, Granted):
            return f"It would be admitted now: {given.blocks} blocks, an output cap of {given.output_cap}."
        return str(AdmissionRefused(given))

    def count_refusal(self, reason: Reason) -> None:
        """Count a refusal that was decided outside (a bad body, an unknown path)."""
        self._turnstile.refused(reason)

    def _entry(self) -> Entry:
        return Entry(self._turnstile, self.abort_grace, self.busy_status)

    def _ask(
        self,
        prompt_tokens: int | Iterable[int],
        max_tokens: int | None,
        n: int,
        max_wait: Seconds,
        tenant: Tenant | str,
        identity: int,
    ) -> Ask:
        prompts = (prompt_tokens,) if isinstance(prompt_tokens, int) else tuple(prompt_tokens)
        if isinstance(tenant, str):
            tenant = Tenant(tenant)
        return Ask(prompts, max_tokens, n, self.rules, max_wait, clock.draw(), tenant, identity)


class ThreadAdmission(_Front):
    """Admission for threads. Safe to share; see `Admission.threads` for one pool with coroutines."""

    def admit(
        self,
        prompt_tokens: int | Iterable[int],
        max_tokens: int | None = None,
        *,
        n: int = 1,
        max_wait: Seconds = 0.0,
        tenant: Tenant | str = ANYONE,
        identity: int = 0,
    ) -> ThreadAdmitting:
        """`with admission.admit(...) as ticket:`, as `Admission.admit`; the thread waits."""
        ask = self._ask(prompt_tokens, max_tokens, n, max_wait, tenant, identity)
        return ThreadAdmitting(self._entry(), ask)

    def guard(
        self, size: Callable[..., Size], *, max_wait: Seconds = 0.0
    ) -> Callable[[Callable[..., R]], Callable[..., R]]:
        """As `Admission.guard`, for a function."""

        def decorate(function: Callable[..., R]) -> Callable[..., R]:
            if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
                raise Misuse("guard holds the reservation for a call: this function only begins in it")

            @functools.wraps(function)
            def guarded(*args: Any, **kwargs: Any) -> R:
                prompt_tokens, max_tokens = _pair(size(*args, **kwargs))
                with self.admit(prompt_tokens, max_tokens, max_wait=max_wait) as ticket:
                    return function(*args, **kwargs, ticket=ticket)

            return guarded

        return decorate


class Admission(_Front):
    """Admission for coroutines, in asyncio and in trio; one object may serve several loops."""

    def admit(
        self,
        prompt_tokens: int | Iterable[int],
        max_tokens: int | None = None,
        *,
        n: int = 1,
        max_wait: Seconds = 0.0,
        tenant: Tenant | str = ANYONE,
        identity: int = 0,
    ) -> AsyncAdmitting:
        """`async with admission.admit(...) as ticket:` holds what the request may reach.

        `prompt_tokens`: exact tokens of the prompt, or of each prompt. `max_tokens`: the most new
        tokens; None is the rest of the context, as for the engine. `n`: sequences for each prompt.
        `max_wait`: seconds to stand in line; 0 answers at once. `identity`: the same number for the
        same request when it comes back, so that it keeps its place. Entering raises
        `AdmissionRefused`, and `Misuse` for sizes that cannot be.
        """
        return self.enter(self._ask(prompt_tokens, max_tokens, n, max_wait, tenant, identity))

    def enter(self, ask: Ask) -> AsyncAdmitting:
        """As `admit`, for a question that is ready: what the middlewares use."""
        return AsyncAdmitting(self._entry(), ask)

    @property
    def threads(self) -> ThreadAdmission:
        """The same pool, for threads."""
        twin = ThreadAdmission.__new__(ThreadAdmission)
        twin.__dict__ = self.__dict__
        return twin

    def guard(
        self, size: Callable[..., Size], *, max_wait: Seconds = 0.0
    ) -> Callable[[Callable[..., Awaitable[R]]], Callable[..., Awaitable[R]]]:
        """Decorates a coroutine function that generates: each call is admitted first.

        `size` gets the call's arguments and returns its prompt tokens, or (prompt tokens, output
        cap). The function gets the ticket as the keyword `ticket` and must keep to `ticket.output_cap`.
        """

        def decorate(function: Callable[..., Awaitable[R]]) -> Callable[..., Awaitable[R]]:
            if not inspect.iscoroutinefunction(function):
                raise Misuse("guard holds the reservation for an awaited call: decorate an async def")

            @functools.wraps(function)
            async def guarded(*args: Any, **kwargs: Any) -> R:
                prompt_tokens, max_tokens = _pair(size(*args, **kwargs))
                async with self.admit(prompt_tokens, max_tokens, max_wait=max_wait) as ticket:
                    return await function(*args, **kwargs, ticket=ticket)

            return guarded

        return decorate


def _pair(size: Size) -> tuple[int, int | None]:
    return (size, None) if isinstance(size, int) else size
