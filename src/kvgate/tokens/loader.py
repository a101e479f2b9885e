"""A model's directory, read into what counting needs.

`DIR` holds `tokenizer.json` and `tokenizer_config.json`, as on a model's page, and optionally
`chat_template.jinja` or `chat_template.json` (each wins over the one in the config, as in
transformers), `additional_chat_templates/*.jinja`, `config.json`, `preprocessor_config.json` and
`processor_config.json` (for images and recordings). In place of `tokenizer.json` it may have Mistral's
own file or a SentencePiece model.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvgate.tokens.audio import AudioRule, audio_rule
from kvgate.tokens.bounds import Bounds
from kvgate.tokens.images import ImageRule, image_rule
from kvgate.tokens.mistral import native_file, prefers_native
from kvgate.tokens.records import BadTokenizer
from kvgate.tokens.sentencepiece import convert, native_sentencepiece
from kvgate.tokens.separators import AddedToken
from kvgate.tokens.specials import Specials
from kvgate.tokens.tekken import read_tekken
from kvgate.tokens.template import ChatTemplate

TOKENIZER = "tokenizer.json"
_SENTENCEPIECE = ("tokenizer.model", "spiece.model")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What the files of one directory say. `path` is the file that holds the tokenizer."""

    path: Path
    reference: Tokenizer
    added: tuple[AddedToken, ...]
    specials: Specials
    template: ChatTemplate | None
    special_tokens: dict[str, str]
    image_rule: ImageRule | None
    audio_rule: AudioRule | None
    # The config asks for a BOS that the tokenizer.json does not add: engines differ on it.
    bos_is_unsure: bool
    # None where the length of a text bounds nothing: no fallback to bytes, or an unknown normalizer.
    bounds: Bounds | None
    # What engines use in place of the template, by name: None where they use the template.
    rendered_by: str | None
    # Whether `path` is in Mistral's own format: special tokens in a text are letters, and there is no
    # template.
    is_native: bool = False

    @contextmanager
    def tokenizer_json(self) -> Iterator[Path]:
        """A tokenizer.json of this tokenizer; it may be gone afterwards."""
        if self.path.name == TOKENIZER:
            yield self.path
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / TOKENIZER
            self.reference.save(str(path), pretty=False)
            yield path


def load_files(
    directory: str | Path, now: Callable[[], datetime] = datetime.now, wants_parts: bool | None = None
) -> ModelFiles:
    """Reads `directory`. Raises `BadTokenizer` with the fix.

    `now` gives the moment that templates may print; `wants_parts` overrides the detection of whether
    the template takes content as a list of parts.
    """
    root = Path(directory)
    if not root.is_dir():
        raise BadTokenizer(f"{root} is not a directory; give the one that holds {TOKENIZER}")
    config = _json(root / "tokenizer_config.json")
    model = _json(root / "config.json")
    native = native_file(root)
    path, reference, controls = _tokenizer(root, native, config, model)
    is_native = path == native
    # A limit stored with the tokenizer is for training; it would cut what is counted.
    reference.no_truncation()
    reference.no_padding()
    specials = _special_tokens(config) | _special_tokens(_json(root / "special_tokens_map.json"))
    if path.name != TOKENIZER:
        specials = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | specials
    source = None if is_native else _template_source(root, config)
    normalizer = _state(reference.normalizer)
    preprocessor = _json(root / "preprocessor_config.json")
    audio = audio_rule(model, preprocessor, _json(root / "processor_config.json"))
    return ModelFiles(
        path=path,
        reference=reference,
        added=tuple(
            AddedToken(
                token.content,
                not (token.lstrip or token.rstrip or token.single_word)
                and (not token.normalized or not normalizer.get("normalizers", normalizer)),
            )
            for token in reference.get_added_tokens_decoder().values()
        ),
        specials=Specials(
            [t.content for t in reference.get_added_tokens_decoder().values() if t.special] + controls
        ),
        template=None
        if source is None
        else ChatTemplate(source, specials, now, wants_parts, None if audio is None else audio.written),
        special_tokens=specials,
        image_rule=image_rule(model, preprocessor),
        audio_rule=audio,
        bos_is_unsure=_bos_is_unsure(path, config) and reference.num_special_tokens_to_add(False) == 0,
        bounds=_bounds(reference, _growth(normalizer)),
        rendered_by=_own_rendering(native, reference),
        is_native=is_native,
    )


def _tokenizer(
    root: Path, native: Path | None, config: dict[str, Any], model: dict[str, Any]
) -> tuple[Path, Tokenizer, list[str]]:
    """The file that vLLM takes, its tokenizer, and special tokens that are not in it as added tokens."""
    path = root / TOKENIZER
    pieces = [root / name for name in _SENTENCEPIECE if (root / name).is_file()]
    if native is not None and (prefers_native(root) or not (path.is_file() or pieces)):
        return native, *(read_tekken if native.suffix == ".json" else native_sentencepiece)(native)
    if path.is_file():
        try:
            return path, Tokenizer.from_file(str(path)), []
        except Exception as error:  # the bindings raise plain Exception for what they cannot read
            raise BadTokenizer(f"{path} is not a {TOKENIZER} that `tokenizers` can read: {error}") from None
    if pieces:
        model_type = str(model.get("model_type", ""))
        return pieces[0], convert(pieces[0], config, model_type, _json(root / "added_tokens.json")), []
    raise BadTokenizer(f"{root} has no {TOKENIZER}: download it from the model's page")


def _bos_is_unsure(path: Path, config: dict[str, Any]) -> bool:
    """Whether versions of transformers differ on a BOS before a text, should the tokenizer add none."""
    if path.name in _SENTENCEPIECE:
        # Without a word on it, version 4 put one there for this class.
        return "add_bos_token" not in config and "Llama" in str(config.get("tokenizer_class"))
    return bool(config.get("add_bos_token"))


def _own_rendering(native: Path | None, reference: Tokenizer) -> str | None:
    """gpt-oss is written by the harmony library, and models with Mistral's own file by mistral-common."""
    if all(reference.token_to_id(name) is not None for name in ("<|start|>", "<|channel|>", "<|call|>")):
        return "openai-harmony"
    return None if native is None else "mistral-common"


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise BadTokenizer(f"{path} is not JSON: {error}; download it again") from None
    if not isinstance(value, dict):
        raise BadTokenizer(f"{path} must hold a JSON object; download it again")
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, ... as templates read them."""
    extra = config.get("extra_special_tokens")
    found: dict[str, str] = {}
    for name, value in {**(extra if isinstance(extra, dict) else {}), **config}.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _template_source(root: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    named: dict[str, str] = {}
    given = config.get("chat_template")
    if isinstance(given, str):
        named["default"] = given
    elif isinstance(given, list):
        named.update({one["name"]: one["template"] for one in given if isinstance(one, dict)})
    processor = _json(root / "chat_template.json").get("chat_template")
    if isinstance(processor, str):
        named["default"] = processor
    if (root / "chat_template.jinja").is_file():
        named["default"] = (root / "chat_template.jinja").read_text("utf-8")
    for path in sorted((root / "additional_chat_templates").glob("*.jinja")):
        named[path.stem] = path.read_text("utf-8")
    return named or None


def _state(component: Any) -> dict[str, Any]:
    return {} if component is None else dict(json.loads(component.__getstate__()))


def _growth(normalizer: dict[str, Any]) -> int | None:
    kind = normalizer.get("type")
    if kind is None or (kind == "Sequence" and not normalizer.get("normalizers")):
        return 1
    if kind == "NFC":
        return 3  # the bound of the Unicode standard for UTF-8 (annex 15)
    if kind == "Sequence":
        steps = normalizer["normalizers"]
        return 1 if all(_replaces(step) or step.get("type") == "Prepend" for step in steps) else None
    if _replaces(normalizer):
        return 1  # a space becomes one mark, which is one entry of the vocabulary
    return None


def _bounds(reference: Tokenizer, growth: int | None) -> Bounds | None:
    by_bytes = b"ByteLevel" in (
        reference.pre_tokenizer.__getstate__() if reference.pre_tokenizer else b""
    ) or getattr(reference.model, "byte_fallback", False)
    if growth is None or not by_bytes or _may_add_to_each_byte(reference):
        return None
    return Bounds(max(len(token.encode()) for token in reference.get_vocab()), growth)


def _may_add_to_each_byte(reference: Tokenizer) -> bool:
    """Whether a text may have more tokens than bytes because something is put before each piece of it.

    A piece is what stands between two added tokens, which make up for it if they have two bytes or more.
    """
    normalizer, pre = _state(reference.normalizer), _state(reference.pre_tokenizer)
    steps = pre.get("pretokenizers", [pre])
    adding = [
        number
        for number, step in enumerate(steps)
        if step.get("add_prefix_space") or step.get("prepend_scheme") == "always"
    ]
    if any(adding):
        return True  # behind another step, which makes pieces of any size
    if not adding and all(
        step.get("type") != "Prepend" for step in normalizer.get("normalizers", [normalizer])
    ):
        return False
    added = reference.get_added_tokens_decoder().values()
    return any(len(token.content.encode()) < 2 for token in added)


def _replaces(normalizer: dict[str, Any]) -> bool:
    return normalizer.get("type") == "Replace" and normalizer.get("pattern") == {"String": " "}
