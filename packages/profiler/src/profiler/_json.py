"""Profiles as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from itertools import pairwise
from typing import Any, NoReturn, TypeVar

from ._data import LayerProfile, ProfileData, SkipProfile

Profile = TypeVar("Profile", bound=ProfileData)

SCHEMA = "gpipe-profiler/3"
_MOST_DIGITS = 100


def dump(profile: ProfileData) -> str:
    return json.dumps({"schema": SCHEMA, **asdict(profile)}, indent=1, allow_nan=False)


def load(cls: type[Profile], text: str) -> Profile:
    """The profile of `text`. Raises ValueError with the path of the first thing that `dump` would not have written."""
    document = _expect_object(_parse(text), "profile")
    _expect_schema(document.pop("schema", None))
    return _profile(cls, document, "profile")


def _profile(cls: type[Profile], document: Any, where: str) -> Profile:
    values = _read(_expect_object(document, where), _PROFILE, where)
    skips = tuple(_skip(skip, f"skips[{i}]", len(values["layers"])) for i, skip in enumerate(values.pop("skips")))
    layers = tuple(_layer(layer, f"layers[{i}]") for i, layer in enumerate(values.pop("layers")))
    _expect_unique([layer.name for layer in layers])
    loss = values.pop("loss")
    others = tuple(_profile(cls, other, f"others[{i}]") for i, other in enumerate(values.pop("others")))
    profile = cls(
        layers=layers, loss=None if loss is None else _layer(loss, "loss"), others=others, skips=skips, **values
    )
    _expect_ascending([*others, profile])
    return profile


def _layer(document: Any, where: str) -> LayerProfile:
    return LayerProfile(**_read(_expect_object(document, where), _LAYER, where))


def _skip(document: Any, where: str, layers: int) -> SkipProfile:
    skip = SkipProfile(**_read(_expect_object(document, where), _SKIP, where))
    if not skip.source < skip.target < layers:
        raise ValueError(f"{where}: expected a source before a target among {layers} layers, got {skip}")
    return skip


def _expect_ascending(profiles: Sequence[ProfileData]) -> None:
    for fewer, more in pairwise(profiles):
        alike = fewer.names == more.names and _ways(fewer) == _ways(more) and (not fewer.loss) == (not more.loss)
        if not alike or fewer.rows >= more.rows or fewer.others:
            raise ValueError("others: expected profiles of the same layers with fewer rows, in ascending order")


def _ways(profile: ProfileData) -> list[tuple[int, int]]:
    return [(skip.source, skip.target) for skip in profile.skips]


def _parse(text: str) -> Any:
    def constant(name: str) -> NoReturn:
        raise ValueError(f"profile: expected numbers of JSON, got {name}")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        _expect_unique([key for key, _ in items])
        return dict(items)

    def integer(digits: str) -> int:
        if len(digits) > _MOST_DIGITS:
            raise ValueError(f"profile: expected numbers of at most {_MOST_DIGITS} digits, got one of {len(digits)}")
        return int(digits)

    try:
        return json.loads(text, parse_constant=constant, parse_int=integer, object_pairs_hook=pairs)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"profile: expected the text that Profile.to_json wrote, got no JSON: {error}") from None


def _expect_object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object, got {type(value).__name__}")
    return value


def _expect_schema(schema: Any) -> None:
    if schema != SCHEMA:
        raise ValueError(f"schema: this version reads {SCHEMA!r}, got {schema!r}; profile again to compare")


def _expect_unique(names: list[str]) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"profile: {twice!r} occurs twice")


def _read(document: dict[str, Any], expected: dict[str, Check], where: str) -> dict[str, Any]:
    if missing := expected.keys() - document.keys():
        raise ValueError(f"{where}: lacks {', '.join(sorted(missing))}")
    if surplus := document.keys() - expected.keys():
        raise ValueError(f"{where}: does not know {', '.join(sorted(surplus))}")
    for key, check in expected.items():
        if not check(document[key]):
            raise ValueError(f"{where}.{key}: expected {check.__doc__}, got {document[key]!r}")
    return document


Check = Callable[[Any], bool]


def _text(value: Any) -> bool:
    """a string"""
    return isinstance(value, str)


def _count(value: Any) -> bool:
    """an integer that is not negative"""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _count_or_none(value: Any) -> bool:
    """an integer that is not negative, or null"""
    return value is None or _count(value)


def _seconds_or_none(value: Any) -> bool:
    """seconds that are not negative, or null"""
    return value is None or (type(value) in (int, float) and math.isfinite(value) and value >= 0)


def _list(value: Any) -> bool:
    """a list"""
    return isinstance(value, list)


def _object_or_none(value: Any) -> bool:
    """an object, or null"""
    return value is None or isinstance(value, dict)


_BY_ANNOTATION: dict[str, Check] = {
    "str": _text,
    "int": _count,
    "int | None": _count_or_none,
    "float | None": _seconds_or_none,
    "tuple[LayerProfile, ...]": _list,
    "tuple[ProfileData, ...]": _list,
    "tuple[SkipProfile, ...]": _list,
    "LayerProfile | None": _object_or_none,
}
_PROFILE = {field.name: _BY_ANNOTATION[str(field.type)] for field in fields(ProfileData)}
_SKIP = {field.name: _BY_ANNOTATION[str(field.type)] for field in fields(SkipProfile)}
_LAYER = {field.name: _BY_ANNOTATION[str(field.type)] for field in fields(LayerProfile)}
