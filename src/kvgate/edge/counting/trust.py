"""Whether the tokenizer at hand counts as the engine does.

The operator names a model's directory; the engine may run another template, or another tokenizer,
than the one in it. Promises: a kind of prompt (chats, texts) is counted here only after `AGREEMENTS`
different counts that were equal to the engine's own; one count below what the engine says, or says
afterwards in its usage, ends that until the gateway is restarted. An engine that cannot be asked is
checked by its usage alone.
"""

from __future__ import annotations

from kvgate.edge.counting.counted import Counted

AGREEMENTS = 3


class Trust:
    """Of one tokenizer in one engine."""

    def __init__(self, *, can_ask: bool) -> None:
        """`can_ask`: the engine has counting endpoints."""
        self._agreed: dict[bool, set[tuple[int, ...] | None]] = {True: set(), False: set()}
        self._can_ask = {True: can_ask, False: can_ask}
        self._lost: set[bool] = set()
        self.why = ""  # what ended it; for the operator

    def holds(self, is_chat: bool) -> bool:
        """Whether a count can be used that the engine has not confirmed."""
        if is_chat in self._lost:
            return False
        return not self._can_ask[is_chat] or len(self._agreed[is_chat]) >= AGREEMENTS

    def is_lost(self, is_chat: bool) -> bool:
        """Whether nothing is counted here any more."""
        return is_chat in self._lost

    def compare(self, is_chat: bool, ours: Counted, engines: Counted) -> None:
        """The same prompts, counted here and by the engine."""
        if engines.source == "bound":
            # The engine cannot be asked: the operator's word is all there is.
            self._can_ask[is_chat] = False
        elif ours.prompts == engines.prompts:
            self._agreed[is_chat].add(ours.prompts)
        elif ours.source == "bound" and _is_above(ours, engines):
            pass
        else:
            self._lose(is_chat, f"counted {ours.prompts} where the engine counts {engines.prompts}")

    def reported(self, source: str, counted: int, prompt: int) -> None:
        """What was counted, and what the engine says in its usage that it was."""
        if source == "tokenizer" and prompt > counted:
            for is_chat in (True, False):
                self._lose(is_chat, f"counted {counted} where the engine's usage says {prompt}")

    def above_bound(self, bound: int, prompt: int) -> None:
        """A prompt that was let in with at most `bound` tokens, and has more."""
        for is_chat in (True, False):
            self._lose(is_chat, f"took {bound} for the most of a prompt of {prompt} tokens")

    def _lose(self, is_chat: bool, why: str) -> None:
        self._lost.add(is_chat)
        what = "chats and texts" if len(self._lost) == 2 else "chats" if is_chat else "texts"
        self.why = f"{why}: {what} are left to the engine; is --tokenizer the directory of its model?"


def _is_above(ours: Counted, engines: Counted) -> bool:
    if ours.prompts is None or engines.prompts is None:
        return False
    return all(mine >= theirs for mine, theirs in zip(ours.prompts, engines.prompts, strict=True))
