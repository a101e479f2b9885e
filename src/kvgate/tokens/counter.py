"""Exact prompt tokens of text and of chats, with a tokenizer of one model.

Promises: the count that vLLM reports for the same request, or `CannotCount`; `is_exact` is false
where the figure is a bound. Everything is synchronous and pure CPU: see `is_long` for when to call it
off an event loop. One counter may be shared by threads; the accelerators release the GIL while they
encode, the reference holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from kvgate.tokens.accelerators import ACCELERATORS, Load, pick
from kvgate.tokens.bounds import Proofs
from kvgate.tokens.cache import CountCache
from kvgate.tokens.corpus import check_texts
from kvgate.tokens.images import image_size
from kvgate.tokens.loader import ModelFiles
from kvgate.tokens.mistral import count_mistral, mistral_chats
from kvgate.tokens.parts import split_parts
from kvgate.tokens.pieces import PieceCounts, counts_add_up
from kvgate.tokens.recordings import Looks, clip_of
from kvgate.tokens.records import CannotCount, Count, Dropped, Part
from kvgate.tokens.separators import separators
from kvgate.tokens.template import Rendered

CHECK_SEED = 20_260_101
CHECK_TEXTS = 600
# Pieces that are counted until one is compared with the reference.
RECHECK_EVERY = 1_000
DEFAULT_CACHE_BYTES = 32 << 20
# Characters that take about a millisecond, by what counts them; the least for one not named.
_LONG = {"quicktok": 65_536, "fastokens": 8_192, "tokenizers": 2_048}
# mistral-common takes 10 microseconds for a message, however short it is.
_LONG_MISTRAL = 8_192


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
        self._around = files.reference.num_special_tokens_to_add(False)
        added = [token.content for token in files.added]
        texts = check_texts(CHECK_SEED, CHECK_TEXTS, added)
        with files.tokenizer_json() as path:
            chosen, dropped = pick(accelerators, path, added, texts, self._reference)
        written = [files.template.literals] if files.template else []
        marks = separators(files.added, "\0".join([*written, *files.special_tokens.values()]))
        self.separators = marks if counts_add_up(self._reference, marks, texts) else ()
        self._counts = PieceCounts(self._reference, chosen, self.separators, cache_bytes, recheck_every)
        self._counts.dropped += dropped
        self._mistral = mistral_chats(files.path, self._counts.of_text) if files.is_native else None

    def count_chat(self, fields: dict[str, Any], *, with_parts: bool = False) -> Count:
        """Tokens of a chat completion's body. Raises `CannotCount`, also where the template refuses."""
        if self._files.is_native:
            return count_mistral(self._mistral, fields, with_parts)
        if self._files.template is None:
            raise CannotCount("the tokenizer's directory holds no chat template")
        rendered = self._files.template.render(fields)
        text = rendered.text
        if rendered.images or rendered.audio:
            _refuse_media_settings(fields)
        images, images_exact = self._images(rendered)
        audio, audio_exact = self._audio(rendered)
        is_exact = images_exact and audio_exact
        around = self._around if fields.get("add_special_tokens") else self._missing_bos(text)
        try:
            tokens = self._counts.of_chat(rendered) + images + audio + around
            parts = self._parts(rendered, images, audio, around) if with_parts else ()
        except (UnicodeError, TypeError):
            raise CannotCount("the text holds half of a surrogate pair") from None
        return Count(tokens, "tokenizer" if is_exact else "bound", is_exact, parts)

    def count_text(self, text: str, add_special: bool = True) -> Count:
        """Tokens of a completion's prompt; `add_special` as the request's `add_special_tokens`."""
        # Here engines differ by their version of transformers: the larger figure is taken.
        unsure = add_special and self._files.bos_is_unsure
        try:
            tokens = self._counts.of_text(text) + (self._around if add_special else 0) + unsure
        except (UnicodeError, TypeError):
            raise CannotCount("the text holds half of a surrogate pair") from None
        return Count(tokens, "bound" if unsure else "tokenizer", not unsure)

    def is_long(self, characters: int) -> bool:
        """Whether a body of so many characters may take over a millisecond: count it in a thread."""
        limit = _LONG.get(self.counted_by, min(_LONG.values()))
        return characters > (limit if self._mistral is None else min(limit, _LONG_MISTRAL))

    @cached_property
    def proofs(self) -> Proofs:
        """What is proven of prompts that are not counted. Reads the vocabulary when first used."""
        return Proofs(self._files)

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
        return self._counts.cache

    @property
    def counted_by(self) -> str:
        """What counts now: an accelerator's name, or `tokenizers`."""
        return self._counts.counted_by

    @property
    def dropped(self) -> list[Dropped]:
        """The accelerators that are not used, and why."""
        return self._counts.dropped

    @property
    def renders_as_vllm(self) -> bool:
        """Whether chats are counted with what vLLM uses in place of a template (`rendered_by`)."""
        return self._mistral is not None

    def _reference(self, text: str) -> int:
        return len(self._files.reference.encode(text, add_special_tokens=False))

    def _missing_bos(self, text: str) -> int:
        bos = self._files.special_tokens.get("bos_token")
        return 1 if self._chat_adds_bos and bos and not text.startswith(bos) else 0

    def _images(self, rendered: Rendered) -> tuple[int, bool]:
        """Tokens that the images add to the one placeholder of each, and whether that is exact."""
        rule, total, is_exact = self._files.image_rule, 0, True
        # Where the template takes only text, the engine writes a placeholder on a line of its own.
        written, line = (1, 0) if rendered.writes_images else (0, 2)
        for image in rendered.images:
            if self._image_tokens is not None:
                total, is_exact = total + self._image_tokens + line, False
            elif rule is not None:
                one = rule.tokens(image_size(image))
                total += one.tokens - written + line
                is_exact = is_exact and one.is_exact and rendered.writes_images
            else:
                raise CannotCount(
                    "the tokens of an image are not known for this model: put its config.json and "
                    "preprocessor_config.json beside the tokenizer, or state the most of one image"
                )
        return total, is_exact

    def _audio(self, rendered: Rendered) -> tuple[int, bool]:
        """Tokens that the recordings add to their placeholders, and whether that is exact."""
        rule, total, is_exact, looks = self._files.audio_rule, 0, True, Looks()
        for part in rendered.audio:
            if rule is None:
                raise CannotCount(
                    "the tokens of a recording are not known for this model: put its config.json and "
                    "preprocessor_config.json beside the tokenizer"
                )
            one = rule.tokens(clip_of(part, looks))
            if one is None:
                raise CannotCount(
                    "the length of a recording is not to be seen: send WAV or FLAC in 'input_audio' or in "
                    "a 'data:' URL"
                )
            # A placeholder that is no token of its own is left in the count: a bound.
            written = self._files.reference.token_to_id(rule.placeholder) is not None
            total, is_exact = total + one.tokens - written, is_exact and one.is_exact and written
        return total, is_exact

    def _parts(self, rendered: Rendered, images: int, audio: int, around: int) -> tuple[Part, ...]:
        encoded = self._files.reference.encode(rendered.text, add_special_tokens=False)
        parts = split_parts(rendered, [start for start, _ in encoded.offsets])
        extra = [Part("images", images)] if rendered.images else []
        extra += [Part("audio", audio)] if rendered.audio else []
        return (*parts, *extra, *([Part("special", around)] if around else []))


def _refuse_media_settings(fields: dict[str, Any]) -> None:
    for name in ("mm_processor_kwargs", "media_io_kwargs"):
        if fields.get(name):
            raise CannotCount(f"{name!r} changes what images and recordings become")
