"""Profiles as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from itertools import pairwise
from reprlib import repr as shortened
from typing import Any, NoReturn, TypeVar

from ._data import LayerProfile, ProfileData, SkipProfile

Profile = TypeVar("Profile", bound=ProfileData)

SCHEMA = "gpipe-profiler/3"
_MOST_DIGITS = 100
_EXPECTED = {
    "str": "a string",
    "int": "an integer that is not negative",
    "float": "seconds that are not negative",
}


def dump(profile: ProfileData) -> str:
    return json.dumps({"schema": SCHEMA, **asdict(profile)}, indent=1, allow_nan=False)


def load(cls: type[Profile], text: str) -> Profile:
    """The profile of `text`. Raises ValueError with the path of the first thing that `dump` would not have written."""
    try:
        document = json.loads(text, parse_constant=_constant, parse_int=_integer, object_pairs_hook=_pairs)
        if not isinstance(document, dict):
            raise ValueError(f"profile: expected an object, got {type(document).__name__}")
        if (schema := document.pop("schema", None)) != SCHEMA:
            raise ValueError(
                f"schema: this version reads {SCHEMA!r}, got {shortened(schema)}; profile again to compare"
            )
        profile: Profile = _read({"Profile": cls, "LayerProfile": LayerProfile, "SkipProfile": SkipProfile}, "Profile",
                                 document, "profile")  # fmt: skip
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"profile: expected the text that Profile.to_json wrote, got no JSON: {error}") from None
    _expect_whole([*profile.others, profile])
    return profile


def _expect_whole(profiles: Sequence[ProfileData]) -> None:
    """Raises unless layers and skips are the same for all numbers of rows, and each layer occurs once."""
    for each in profiles:
        _expect_once(each.names)
        if not each.names:
            raise ValueError("layers: expected at least one")
        for skip in each.skips:
            if not skip.source < skip.target < len(each):
                raise ValueError(f"skips: expected a source before a target among {len(each)} layers, got {skip}")
    for fewer, more in pairwise(profiles):
        if _form(fewer) != _form(more) or fewer.rows >= more.rows or fewer.others:
            raise ValueError("others: expected profiles of the same layers with fewer rows, in ascending order")


def _form(profile: ProfileData) -> tuple[object, ...]:
    return profile.names, [(skip.source, skip.target) for skip in profile.skips], profile.loss is None


def _constant(name: str) -> NoReturn:
    raise ValueError(f"profile: expected numbers of JSON, got {name}")


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"profile: expected numbers of at most {_MOST_DIGITS} digits, got one of {len(digits)}")
    return int(digits)


def _pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
    _expect_once([key for key, _ in items])
    return dict(items)


def _expect_once(names: list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"profile: {shortened(name)} occurs twice")
        seen.add(name)


def _read(kinds: dict[str, type], kind: str, value: Any, where: str) -> Any:
    """The object of ``kind``, an annotation, that ``value`` describes."""
    plain = kind.removesuffix(" | None")
    if value is None and plain != kind:
        return None
    if plain.startswith("tuple["):
        if not isinstance(value, list):
            raise ValueError(f"{where}: expected a list, got {shortened(value)}")
        inner = plain.removeprefix("tuple[").removesuffix(", ...]")
        return tuple(_read(kinds, inner, each, f"{where}[{i}]") for i, each in enumerate(value))
    if plain in kinds:
        return _made(kinds, kinds[plain], value, where)
    is_number = type(value) in ((int, float) if plain == "float" else (int,)) and 0 <= value < math.inf
    if not (isinstance(value, str) if plain == "str" else is_number):
        raise ValueError(f"{where}: expected {_EXPECTED[plain]}, got {shortened(value)}")
    return value


def _made(kinds: dict[str, type], kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object, got {shortened(value)}")
    expected = {field.name: str(field.type) for field in fields(kind)}
    if missing := expected.keys() - value.keys():
        raise ValueError(f"{where}: lacks {', '.join(sorted(missing))}")
    if surplus := value.keys() - expected.keys():
        raise ValueError(f"{where}: does not know {', '.join(sorted(surplus))[:200]}")
    return kind(**{name: _read(kinds, each, value[name], f"{where}.{name}") for name, each in expected.items()})
