"""Serialize dataclasses to JSON, and load them back with strict validation."""

from __future__ import annotations

import json
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from reprlib import repr as shortened
from typing import Any, TypeVar

__all__ = ["dump", "load"]

T = TypeVar("T")

_PLAIN: dict[type, tuple[str, Callable[[Any], bool]]] = {
    str: ("a string", lambda value: isinstance(value, str)),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("an integer from 0 to 2**63 - 1", lambda value: type(value) is int and 0 <= value < 2**63),
    float: ("a non-negative number", lambda value: type(value) in (int, float) and 0 <= value <= sys.float_info.max),
}


def dump(value: Any, schema: str) -> str:
    """Serialize a dataclass of numbers, text, tuples and dataclasses.

    Args:
        value: the dataclass. Fields with a leading underscore are omitted.
        schema: the name of the format.

    Returns:
        JSON that :func:`load` turns into an equal dataclass.
    """
    return json.dumps({"schema": schema, **_document(value)}, indent=1, allow_nan=False)


def load(kind: type[T], text: str, name: str, schema: str) -> T:
    """Load a dataclass from the output of :func:`dump`.

    Args:
        kind: the class.
        text: JSON.
        name: the name of the value in error messages.
        schema: the expected name of the format.

    Returns:
        A dataclass that equals the dumped one.

    Raises:
        ValueError: ``text`` cannot be the output of :func:`dump`. The message contains the path of the first error.
    """

    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: expected the output of to_json, got invalid JSON: {error}") from None
    if not isinstance(document, dict):
        raise ValueError(f"{name}: expected an object, got {shortened(document)}")
    if (found := document.pop("schema", None)) != schema:
        raise ValueError(f"schema: expected {schema!r}, got {shortened(found)}; create the {name} with this version")
    read: T = _read(kind, document, name)
    return read


def _document(value: Any) -> Any:
    if is_dataclass(value):
        return {each: _document(getattr(value, each)) for each in _names(type(value))}
    return [_document(each) for each in value] if isinstance(value, tuple) else value


def _names(cls: Any) -> list[str]:
    return [each.name for each in fields(cls) if not each.name.startswith("_")]


def _read(kind: Any, value: Any, where: str) -> Any:
    """Validate ``value`` as ``kind``, which is a dataclass, a tuple, a union with None, or a plain type."""
    if is_dataclass(kind):
        return _read_fields(kind, value, where)
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where}: expected a list, got {shortened(value)}")
        return tuple(_read(of[0], each, f"{where}[{k}]") for k, each in enumerate(value))
    if origin is types.UnionType:
        return None if value is None else _read(of[0], value, where)
    expected, fits = _PLAIN[kind]
    if not fits(value):
        raise ValueError(f"{where}: expected {expected}, got {shortened(value)}")
    return value


def _read_fields(cls: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object, got {shortened(value)}")
    kinds, names = typing.get_type_hints(cls), _names(cls)
    if missing := set(names) - value.keys():
        raise ValueError(f"{where}: missing {', '.join(sorted(missing))}")
    if surplus := value.keys() - set(names):
        raise ValueError(f"{where}: unknown {', '.join(sorted(surplus))[:200]}")
    read = {name: _read(kinds[name], value[name], f"{where}.{name}") for name in names}
    try:
        return cls(**read)
    except ValueError as error:  # the class checks relations between its fields
        raise ValueError(f"{where}.{error}") from None
