"""Exact prompt tokens of text and of chats, with a tokenizer of one model.

Promises: the count that vLLM reports for the same request, or `CannotCount`; `is_exact` is false
where the figure is a bound. Everything is synchronous and pure CPU: see `is_long` for when to call it
off an event loop. One counter may be shared by threads; the accelerators release the GIL while they
encode, the reference holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvgate.tokens.accelerators import ACCELERATORS, CountText, Load, pick
from kvgate.tokens.cache import TEXT_KEY_MAX, CountCache
from kvgate.tokens.corpus import check_texts
from kvgate.tokens.images import image_size
from kvgate.tokens.loader import ModelFiles
from kvgate.tokens.parts import split_parts
from kvgate.tokens.records import CannotCount, Count, Dropped, Part
from kvgate.tokens.separators import cutter, separators
from kvgate.tokens.template import Rendered

CHECK_SEED = 20_260_101
CHECK_TEXTS = 600
# A running check costs one count by the reference; texts above this are not checked again.
RECHECK_EVERY = 1_000
RECHECK_MAX = 20_000
DEFAULT_CACHE_BYTES = 32 << 20
# Characters that take about a millisecond, by what counts them; the least for one not named.
_LONG = {"quicktok": 65_536, "fastokens": 8_192, "tokenizers": 2_048}


class PromptCounter:
    """Counts with the reference tokenizer, or with an accelerator that agrees with it."""

    def __init__(
        self,
        files: ModelFiles,
        *,
        accelerators: Sequence[tuple[str, Load]] = ACCELERATORS,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        chat_adds_bos: bool = False,
        image_tokens: int | None = None,
        recheck_every: int = RECHECK_EVERY,
    ) -> None:
        """`accelerators`: what to try, in order; none for the reference alone.

        `chat_adds_bos`: the engine puts BOS before a chat that does not begin with it (llama.cpp).

        `image_tokens`: the most tokens of one image, for models whose rule is not known here.
        """
        self._files = files
        # What another process needs to count like the reference does here.
        self.options: dict[str, Any] = {
            "accelerators": [],
            "cache_bytes": cache_bytes,
            "chat_adds_bos": chat_adds_bos,
            "image_tokens": image_tokens,
        }
        self._chat_adds_bos = chat_adds_bos
        self._image_tokens = image_tokens
        self._recheck_every = recheck_every
        self._until_recheck = recheck_every
        self._cache = CountCache(cache_bytes)
        self.dropped: list[Dropped] = []
        self._around = files.reference.num_special_tokens_to_add(False)
        added = [token.content for token in files.added]
        texts = check_texts(CHECK_SEED, CHECK_TEXTS, added)
        self._count: CountText = self._reference
        self.counted_by = "tokenizers"
        chosen, self.dropped = pick(accelerators, files.path, added, texts, self._reference)
        if chosen is not None:
            self._count, self.counted_by = chosen.count, chosen.name
        written = [files.template.literals] if files.template else []
        marks = separators(files.added, "\0".join([*written, *files.special_tokens.values()]))
        self.separators = marks if self._counts_add_up(marks, texts) else ()
        self._cut = cutter(self.separators)

    def count_chat(self, fields: dict[str, Any], *, with_parts: bool = False) -> Count:
        """Tokens of a chat completion's body. Raises `CannotCount`, also where the template refuses."""
        if self._files.template is None:
            raise CannotCount("the tokenizer's directory holds no chat template")
        rendered = self._files.template.render(fields)
        text = rendered.text
        images, is_exact = self._images(rendered)
        around = self._around if fields.get("add_special_tokens") else self._missing_bos(text)
        try:
            tokens = self._tokens(text) + images + around
            parts = self._parts(rendered, images, around) if with_parts else ()
        except (UnicodeError, TypeError):
            raise CannotCount("the text holds half of a surrogate pair") from None
        return Count(tokens, "tokenizer" if is_exact else "bound", is_exact, parts)

    def count_text(self, text: str, add_special: bool = True) -> Count:
        """Tokens of a completion's prompt; `add_special` as the request's `add_special_tokens`."""
        # Here engines differ by their version of transformers: the larger figure is taken.
        unsure = add_special and self._files.bos_is_unsure
        try:
            tokens = self._tokens(text) + (self._around if add_special else 0) + unsure
        except (UnicodeError, TypeError):
            raise CannotCount("the text holds half of a surrogate pair") from None
        return Count(tokens, "bound" if unsure else "tokenizer", not unsure)

    def is_long(self, characters: int) -> bool:
        """Whether a body of so many characters may take over a millisecond: count it in a thread."""
        return characters > _LONG.get(self.counted_by, min(_LONG.values()))

    def bounds(self, text: str) -> tuple[int, int] | None:
        """Bounds on a text's tokens without counting, specials around it included; None: no bounds."""
        limits = self._files.bounds
        if limits is None:
            return None
        return limits.least(text), limits.most(text) + self._around

    def spells_special(self, text: str) -> bool:
        """Whether the text may spell out a special token, which not every engine has in its vocabulary."""
        return self._files.specials.are_in(text)

    @property
    def directory(self) -> Path:
        """Where the model's files are."""
        return self._files.path.parent

    @property
    def releases_lock(self) -> bool:
        """Whether other threads run while a text is encoded."""
        return self.counted_by != "tokenizers"

    @property
    def rendered_by(self) -> str | None:
        """What writes this model's prompts in engines in place of the template; None: the template."""
        return self._files.rendered_by

    @property
    def cache(self) -> CountCache:
        """The counts that are remembered: its figures are for metrics."""
        return self._cache

    def _tokens(self, text: str) -> int:
        if self._cut is None:
            return self._piece(text) if text else 0
        pieces = self._cut.split(text)
        total, hits = len(pieces) - 1, 0
        known = self._cache.newest
        for piece in pieces:
            if piece in known:
                # A long text is never a key; most pieces of a chat end here.
                total += known[piece]
                hits += 1
            elif piece:
                total += self._piece(piece)
                known = self._cache.newest
        self._cache.hits += hits
        return total

    def _piece(self, text: str) -> int:
        key = text if len(text) <= TEXT_KEY_MAX else CountCache.key(text)
        known = self._cache.get(key)
        return self._fresh(text, key) if known is None else known

    def _fresh(self, text: str, key: str | bytes) -> int:
        count = self._count(text)
        self._until_recheck -= 1
        if self._until_recheck <= 0 and len(text) <= RECHECK_MAX:
            self._until_recheck = self._recheck_every
            count = self._rechecked(text, count)
        self._cache.put(key, count)
        return count

    def _reference(self, text: str) -> int:
        return len(self._files.reference.encode(text, add_special_tokens=False))

    def _rechecked(self, text: str, count: int) -> int:
        """The reference's count; an accelerator that differs is not used again."""
        truth = self._reference(text)
        if truth != count and self.counted_by != "tokenizers":
            self.dropped.append(Dropped(self.counted_by, f"while running: counted {count} for {truth}"))
            self._count, self.counted_by = self._reference, "tokenizers"
            self._cache.clear()
        return truth

    def _counts_add_up(self, marks: tuple[str, ...], texts: list[str]) -> bool:
        """Whether cutting at `marks` leaves every count as it is, between all kinds of neighbours."""
        if not marks:
            return False
        cut = cutter(marks)
        assert cut is not None
        for index, text in enumerate(texts):
            mark, other = marks[index % len(marks)], marks[index // len(marks) % len(marks)]
            whole = f"{text}{mark}{texts[-1 - index]}{other}{text}"
            pieces = cut.split(whole)
            if len(pieces) - 1 + sum(map(self._reference, pieces)) != self._reference(whole):
                return False
        return True

    def _missing_bos(self, text: str) -> int:
        bos = self._files.special_tokens.get("bos_token")
        return 1 if self._chat_adds_bos and bos and not text.startswith(bos) else 0

    def _images(self, rendered: Rendered) -> tuple[int, bool]:
        """Tokens that the images add to the one placeholder of each, and whether that is exact."""
        rule, total, is_exact = self._files.image_rule, 0, True
        for image in rendered.images:
            if self._image_tokens is not None:
                total, is_exact = total + self._image_tokens, False
            elif rule is not None:
                one = rule.tokens(image_size(image))
                total, is_exact = total + one.tokens - 1, is_exact and one.is_exact
            else:
                raise CannotCount(
                    "the tokens of an image are not known for this model: put its config.json and "
                    "preprocessor_config.json beside the tokenizer, or state the most of one image"
                )
        return total, is_exact

    def _parts(self, rendered: Rendered, images: int, around: int) -> tuple[Part, ...]:
        encoded = self._files.reference.encode(rendered.text, add_special_tokens=False)
        parts = split_parts(rendered, [start for start, _ in encoded.offsets])
        extra = [Part("images", images)] if rendered.images else []
        return (*parts, *extra, *([Part("special", around)] if around else []))
