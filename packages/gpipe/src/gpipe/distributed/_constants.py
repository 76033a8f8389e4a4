"""Constants as JSON: what JSON has, as it is; all others as a list of a word and details."""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from types import EllipsisType, NoneType
from typing import Any

import torch

from ._names import class_of, member_names, member_of, name_of

_LARGE = 2**63  # integers that fit into 64 bits, as many JSON readers keep them


def written(value: Any) -> Any:
    """``value`` as JSON holds it. If it is no constant, raises TypeError with the end of a sentence that names it."""
    if value is None or isinstance(value, enum.Enum):
        return value if value is None else ["enum", name_of(type(value)), member_names(value)]
    kind = type(value)
    if kind in _WRITERS:
        return _WRITERS[kind](value)
    if isinstance(value, type):
        return ["class", name_of(value)]
    if _is_numpy(kind):
        return ["numpy", value.dtype.str, value.tobytes().hex()]
    raise TypeError(
        f"is of type {kind.__qualname__}, which is not sent to another process; expected tensors, None and constants "
        "such as numbers and strings, in tuples, lists, dicts and dataclasses; make it a dataclass, or pass its "
        "tensors"
    )


def read(json: Any) -> Any:
    """The constant that :func:`written` has written. Raises ValueError if ``json`` is nothing of the kind."""
    if not isinstance(json, list):
        return json
    word, *details = json
    if word not in _READERS:
        raise ValueError(f"{word!r} is no kind of constant")
    return _READERS[word](*details)


def _is_numpy(kind: type) -> bool:
    """Whether ``kind`` is the type of a numpy number."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.number | numpy.bool_) and kind.__module__ == "numpy"


def _read_numpy(dtype: str, data: str) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        raise ValueError("a numpy number has come to a process without numpy; import it on every rank")
    return numpy.frombuffer(bytes.fromhex(data), numpy.dtype(dtype))[0]


def _int(value: int) -> Any:
    return value if -_LARGE <= value < _LARGE else ["int", hex(value)]


def _float(value: float) -> Any:
    return value if math.isfinite(value) else ["float", str(value)]


def _items(value: Any) -> list[Any]:
    return [written(each) for each in value]


def _itself(value: Any) -> Any:
    return value


def _of_torch(kind: type) -> Callable[[str], Any]:
    """A function that reads a constant of torch, such as ``float32``."""

    def read_it(name: str) -> Any:
        found = vars(torch).get(name)
        if not isinstance(found, kind):
            raise ValueError(f"torch has no {kind.__name__} {name!r}")
        return found

    return read_it


def _short(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise ValueError(f"{text!r} is no device") from error


_WRITERS: dict[type, Callable[[Any], Any]] = {
    NoneType: _itself,
    bool: _itself,
    str: _itself,
    int: _int,
    float: _float,
    complex: lambda value: ["complex", _float(value.real), _float(value.imag)],
    bytes: lambda value: ["bytes", value.hex()],
    range: lambda value: ["range", *_items((value.start, value.stop, value.step))],
    slice: lambda value: ["slice", *_items((value.start, value.stop, value.step))],
    EllipsisType: lambda value: ["ellipsis"],
    Decimal: lambda value: ["Decimal", str(value)],
    Fraction: lambda value: ["Fraction", *_items((value.numerator, value.denominator))],
    torch.dtype: lambda value: ["dtype", _short(value)],
    torch.device: lambda value: ["device", str(value)],
    torch.layout: lambda value: ["layout", _short(value)],
    torch.memory_format: lambda value: ["memory_format", _short(value)],
    torch.Size: lambda value: ["Size", *value],
    tuple: lambda value: ["tuple", *_items(value)],
    list: lambda value: ["list", *_items(value)],
    dict: lambda value: ["dict", *[[written(key), written(each)] for key, each in value.items()]],
}

_READERS: dict[str, Callable[..., Any]] = {
    "int": lambda text: int(text, 16),
    "float": lambda text: float(text),
    "complex": lambda real, imag: complex(read(real), read(imag)),
    "bytes": bytes.fromhex,
    "range": lambda *parts: range(*map(read, parts)),
    "slice": lambda *parts: slice(*map(read, parts)),
    "ellipsis": lambda: ...,
    "Decimal": Decimal,
    "Fraction": lambda *parts: Fraction(*map(read, parts)),
    "dtype": _of_torch(torch.dtype),
    "device": _device,
    "layout": _of_torch(torch.layout),
    "memory_format": _of_torch(torch.memory_format),
    "Size": lambda *sizes: torch.Size(sizes),
    "tuple": lambda *items: tuple(map(read, items)),
    "list": lambda *items: [*map(read, items)],
    "dict": lambda *items: {read(key): read(each) for key, each in items},
    "enum": lambda name, members: member_of(class_of(name), members),
    "class": class_of,
    "numpy": _read_numpy,
}
