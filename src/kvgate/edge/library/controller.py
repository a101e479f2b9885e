"""The small classic interface: bytes of KV cache, admitted or not, at once and from any thread.

For a server that does its own queueing and its own refusals. Promises: what is reserved never
passes `usable_bytes`, whatever the threads do; a handle gives back what it holds once, and a second
release changes nothing and is counted, instead of being hidden. Standard library only.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from kvgate.core.ledger import Ledger, NotHeld
from kvgate.core.records import Key, Misuse, PoolFacts
from kvgate.core.reservation import request_reservation_bytes, request_reservation_tokens


class KVReservation:
    """What `try_admit` took for one request. Release it once, or use it as a context manager."""

    __slots__ = ("_controller", "_key", "bytes", "tokens")

    def __init__(self, controller: KVAdmissionController, key: Key, tokens: int, size: int) -> None:
        self._controller = controller
        self._key = key
        self.tokens = tokens
        self.bytes = size

    def __repr__(self) -> str:
        state = "released" if self.is_released else "held"
        return f"<KVReservation {self.tokens} tokens, {self.bytes} bytes, {state}>"

    @property
    def is_released(self) -> bool:
        """True once its bytes have been given back."""
        return not self._controller._holds(self._key)

    def release(self) -> bool:
        """Give the bytes back. False, and counted, where that was done before."""
        return self._controller.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # One that was released inside the block has not been released twice: leaving only makes sure.
        self._controller._let_go(self._key)


class KVAdmissionController:
    """Exact books of `total_kv_bytes`, of which `safety_fraction` may be reserved."""

    def __init__(self, total_kv_bytes: int, per_token_bytes: int, safety_fraction: float = 0.9) -> None:
        """`per_token_bytes`: as of `kv_bytes_per_token`. Raises `Misuse` for sizes that cannot be."""
        if per_token_bytes < 1:
            raise Misuse(f"per_token_bytes must be at least 1, got {per_token_bytes}")
        # A byte is a block here; the context plays no part in the books.
        self._ledger = Ledger(
            PoolFacts(total_kv_bytes, block_size=1, context=1, safety_fraction=safety_fraction)
        )
        self._lock = threading.Lock()
        self.per_token_bytes = per_token_bytes

    def try_admit(self, prompt_tokens: int, output_cap: int) -> KVReservation | None:
        """Reserve for a request that may generate `output_cap` tokens; None where it does not fit now.

        The cap must be enforced on the engine. Raises `Misuse` for a negative prompt or a cap below 1.
        """
        tokens = request_reservation_tokens(prompt_tokens, output_cap)
        size = request_reservation_bytes(prompt_tokens, output_cap, self.per_token_bytes)
        with self._lock:
            key = self._ledger.reserve(size)
        return None if key is None else KVReservation(self, key, tokens, size)

    def release(self, handle: KVReservation) -> bool:
        """Give back what `handle` holds. False, and counted in `double_releases`, if it holds nothing.

        Raises `Misuse` for a handle of another controller.
        """
        if handle._controller is not self:
            raise Misuse("this reservation belongs to another controller")
        with self._lock:
            try:
                self._ledger.release(handle._key)
            except NotHeld:
                return False
        return True

    def can_ever_fit(self, prompt_tokens: int, output_cap: int) -> bool:
        """False for a request that must be refused for good: waiting would not help it."""
        size = request_reservation_bytes(prompt_tokens, output_cap, self.per_token_bytes)
        return size <= self.usable_bytes

    @property
    def usable_bytes(self) -> int:
        """`floor(total_kv_bytes x safety_fraction)`."""
        return self._ledger.facts.usable_blocks

    @property
    def reserved_bytes(self) -> int:
        """Sum of all that is held now."""
        return self._ledger.reserved_blocks

    @property
    def free_bytes(self) -> int:
        """`usable_bytes - reserved_bytes`."""
        return self._ledger.free_blocks

    @property
    def free_tokens(self) -> int:
        """The largest prompt + output cap that would be admitted now."""
        return self.free_bytes // self.per_token_bytes

    @property
    def double_releases(self) -> int:
        """How often something was released that was not held: a defect of the calling code."""
        return self._ledger.double_releases

    def __len__(self) -> int:
        """Live reservations."""
        return len(self._ledger)

    def _holds(self, key: Key) -> bool:
        return self._ledger.held(key) is not None

    def _let_go(self, key: Key) -> None:
        with self._lock:
            if self._ledger.held(key) is not None:
                self._ledger.release(key)
