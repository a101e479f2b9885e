"""Fields of one JSON object, read with their type; a wrong one is refused with its name.

Engines disagree on `"5"`, `5.0`, `true` and `0` as a number of tokens, so none of them is taken.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from kvgate.wire.body import BadBody, Path
from kvgate.wire.dialects.shape import CapPlace

PROMPTS_MAX = 256
CHOICES_MAX = 256


def whole(fields: Mapping[str, Any], name: str, *, least: int, at: str = "") -> int | None:
    """An integer of at least `least`, or None where it is absent or null. Raises `BadBody`."""
    value = fields.get(name)
    if value is None:
        return None
    shown = at + name
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadBody(f"{shown!r} must be an integer or null, got {kind(value)}", shown)
    if value < least:
        raise BadBody(f"{shown!r} must be at least {least}, got {value}", shown)
    return value


def cap_of(
    fields: Mapping[str, Any], name: str, *, unset: tuple[int, ...] = (), at: str = "", zero: bool = False
) -> int | None:
    """An output cap. `unset`: negative numbers that mean none; `zero`: whether 0 is a cap."""
    value = fields.get(name)
    if type(value) is int:
        if value > 0:
            return value
        if value in unset:
            return None
    return whole(fields, name, least=0 if zero else 1, at=at)


def choices_of(fields: Mapping[str, Any], *names: str, at: str = "") -> int:
    """The largest of several numbers of sequences, each from 1 to `CHOICES_MAX`."""
    most = 1
    for name in names:
        value = whole(fields, name, least=-(10**9), at=at)
        if value is None:
            continue
        if not 1 <= value <= CHOICES_MAX:
            raise BadBody(f"{at + name!r} must be from 1 to {CHOICES_MAX}, got {value}", at + name)
        most = max(most, value)
    return most


def flag(fields: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A boolean; `default` where it is absent or null."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadBody(f"{name!r} must be true or false, got {kind(value)}", name)
    return value


def text_of(fields: Mapping[str, Any], name: str, at: str = "") -> str | None:
    """A string, or None where it is absent or null."""
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise BadBody(f"{at + name!r} must be a string, got {kind(value)}", at + name)
    return value


def needed_text(fields: Mapping[str, Any], name: str) -> str:
    value = text_of(fields, name)
    if value is None:
        raise BadBody(f"{name!r} is needed and must be a string", name)
    return value


def object_of(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object; an empty one where it is absent or null."""
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadBody(f"{name!r} must be an object, got {kind(value)}", name)
    return value


def objects_of(fields: Mapping[str, Any], name: str, at: str = "") -> list[dict[str, Any]]:
    """A list of objects; an empty one where it is absent or null."""
    value = fields.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadBody(f"{at + name!r} must be a list of objects", at + name)
    return value


def refuse(fields: Mapping[str, Any], names: tuple[str, ...], why: str) -> None:
    """Raise `BadBody` for the first of `names` that is set."""
    for name in names:
        if fields.get(name) is not None:
            raise BadBody(f"{name!r} {why}", name)


def refuse_outliving(fields: Mapping[str, Any]) -> None:
    """Raise `BadBody` where the engine would keep the cache of an answer for another engine to fetch."""
    transfer = fields.get("kv_transfer_params")
    if isinstance(transfer, dict) and transfer.get("do_remote_decode"):
        raise BadBody(
            "'kv_transfer_params.do_remote_decode' is not taken: the engine would keep the memory after its "
            "answer; put the gate before whatever sends prefill and decode to different engines",
            "kv_transfer_params",
        )


def is_token_list(value: list[Any]) -> bool:
    """True for a list of at least one token id, and nothing else."""
    # `type` and not `isinstance`, which lets booleans pass; all steps run in C, because token lists
    # are long, and these take half the time of a set of the types and a minimum.
    if not value or list(map(type, value)).count(int) < len(value):
        return False
    try:
        array("Q", value)  # refuses what is negative, or larger than any id
    except OverflowError:
        return bool(min(value) >= 0)
    return True


def tokens_of(fields: Mapping[str, Any], name: str) -> list[int]:
    value = fields.get(name)
    if not isinstance(value, list) or not is_token_list(value):
        raise BadBody(f"{name!r} must be a list of token ids", name)
    return value


def places(
    fields: Mapping[str, Any], names: tuple[str, ...], first: str, own: Mapping[str, int | None]
) -> tuple[CapPlace, ...]:
    """A place for each cap field that is present, and for `first` where none is."""
    present = [name for name in names if name in fields] or [first]
    return tuple(CapPlace((name,), own.get(name)) for name in present)


def below(path: Path, places: tuple[CapPlace, ...]) -> tuple[CapPlace, ...]:
    """The same places, inside the object at `path`."""
    return tuple(CapPlace((*path, *place.path), place.own) for place in places)


def kind(value: Any) -> str:
    """The JSON type of a value, for a message."""
    names = {str: "a string", bool: "a boolean", float: "a float", list: "a list", dict: "an object"}
    return "null" if value is None else names.get(type(value), "an integer")
