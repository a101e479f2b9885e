"""What one who was admitted holds, and what one who was refused is told.

Promises: a ticket gives its reservation back once, however often it is closed, and never twice to
the books; a refusal carries status, headers and body as the gateway would send them.
"""

from __future__ import annotations

from dataclasses import replace

from kvgate.core.price import price
from kvgate.core.records import Ask, Ending, Granted, Misuse, Price, Reason, Refused, Seconds
from kvgate.edge.library.turnstile import Turnstile
from kvgate.wire.refusal import Dialect, message_of, render


class AdmissionRefused(Exception):
    """Not admitted. `refused` is the core's record; the rest is what an HTTP answer needs of it.

    (`kvgate.Refused` is the record itself, a value; this is the exception that carries it.)
    """

    def __init__(self, refused: Refused, *, busy_status: int = 429) -> None:
        super().__init__(message_of(refused))
        self.refused = refused
        self._busy_status = busy_status

    @property
    def reason(self) -> Reason:
        """Why; `reason.is_busy` tells "come back later" from "never"."""
        return self.refused.reason

    @property
    def retry_after(self) -> Seconds | None:
        """Seconds after which to come back; None where no retry can help."""
        return self.refused.retry_after

    @property
    def output_cap_that_fits(self) -> int | None:
        """The largest output cap that would be admitted at this moment, or None."""
        return self.refused.output_cap_that_fits

    @property
    def status(self) -> int:
        """The HTTP status: 429 (or the chosen one) while busy, 413 for what can never fit."""
        return self.rendered()[0]

    @property
    def headers(self) -> dict[str, str]:
        """Header fields of the answer, `retry-after` and `content-type` among them."""
        return {name.decode(): value.decode("latin-1") for name, value in self.rendered()[1]}

    def body(self, dialect: Dialect | str = Dialect.OPENAI) -> bytes:
        """The JSON body in the shape that clients of this API read."""
        return self.rendered(dialect)[2]

    def rendered(
        self, dialect: Dialect | str = Dialect.OPENAI, cap_name: str = "max_tokens", param: str | None = None
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Status, header fields and body at once, as ASGI sends them."""
        status, lines, body = render(
            self.refused, dialect=dialect, busy_status=self._busy_status, param=param, cap_name=cap_name
        )
        fields = [line.partition(b": ")[::2] for line in lines.split(b"\r\n") if line]
        return status, [(name, value) for name, value in fields], body


class Ticket:
    """A reservation that is held. Made by `admit`; the block that holds it closes it.

    `generated`: set it to the number of tokens that were generated, if you know: retry times get
    better by it.
    """

    __slots__ = ("_grace", "_granted", "_is_closed", "_turnstile", "ask", "generated")

    def __init__(self, turnstile: Turnstile, ask: Ask, granted: Granted, grace: Seconds) -> None:
        self._turnstile = turnstile
        self._granted = granted
        self._grace = grace
        self._is_closed = False
        self.ask = ask
        self.generated: int | None = None

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "held"
        return f"<Ticket {self.blocks} blocks, output cap {self.output_cap}, {state}>"

    @property
    def output_cap(self) -> int:
        """The most tokens that each sequence may generate. The engine must be held to it."""
        return self._granted.output_cap

    @property
    def blocks(self) -> int:
        """Blocks that were reserved."""
        return self._granted.blocks

    @property
    def sequences(self) -> int:
        """Sequence slots that were reserved."""
        return self._granted.sequences

    @property
    def waited(self) -> Seconds:
        """Seconds in the line."""
        return self._granted.waited

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def settle(self, prompt_tokens: int | tuple[int, ...]) -> int:
        """The prompt has been counted exactly now and was no longer than reserved for.

        Gives back the difference and returns the blocks held from now on. Raises `Misuse` for a
        longer prompt: what was promised to others cannot be taken back.
        """
        prompts = (prompt_tokens,) if isinstance(prompt_tokens, int) else tuple(prompt_tokens)
        if len(prompts) != len(self.ask.prompts):
            raise Misuse(f"{len(self.ask.prompts)} prompts were admitted and {len(prompts)} are settled")
        exact = replace(self.ask, prompts=prompts, output_cap=self.output_cap)
        facts = self._turnstile.gate.facts
        priced = price(exact, facts)
        if not isinstance(priced, Price):
            raise Misuse(f"prompts of {prompts} tokens do not fit what was reserved: {priced}")
        blocks = self._turnstile.gate.policy(exact, priced, facts)[0]
        self._turnstile.settle(self._granted.key, blocks)
        self._granted = replace(self._granted, blocks=blocks)
        self.ask = exact
        return blocks

    def close(self, ending: Ending = Ending.COMPLETED, *, after: Seconds | None = None) -> None:
        """Give everything back, `after` seconds from now. Closing again changes nothing.

        By default a completed one at once, any other after the abort grace.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if after is None:
            after = 0.0 if ending is Ending.COMPLETED else self._grace
        self._turnstile.end(self._granted.key, ending, tokens=self.generated, after=after)


def ending_of(error: BaseException | None) -> Ending:
    """How a block ended that was left with `error`. Cancellations are no `Exception`s anywhere."""
    if error is None:
        return Ending.COMPLETED
    return Ending.FAILED if isinstance(error, Exception) else Ending.CANCELLED
