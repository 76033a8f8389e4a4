"""Compare the settings that determine a model's loss: its modes, attributes, buffers and configurations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..values._constants import is_constant
from ..values._leaves import version
from ._buffers import outside

DEPTH = 2
"""The maximum depth of the search for numbers in objects. Configurations may be nested."""

LONG = 64
"""Containers of at least this length are compared by identity and length only."""


class Settings(NamedTuple):
    """The settings of a model at one point in time.

    Attributes:
        key: a hash that is likely to change if a module outside blocks gets a different attribute or hook, or if the
            values of a buffer change.
        held: the objects whose ids are part of ``key``. While they are alive, no new object can have the same id.
    """

    key: int
    held: list[Any]


def collect_settings(model: nn.Module, blocks: Iterable[nn.Module]) -> Settings:
    """Return the settings of ``model`` outside ``blocks``."""
    held: list[Any] = []
    parts = [part for module in outside(model, blocks) for part in _of_module(module, held)]
    return Settings(hash(tuple(parts)), held)


def _of_module(module: nn.Module, held: list[Any]) -> Iterator[Any]:
    attributes = {name: value for name, value in vars(module).items() if name not in _REGISTERED}
    yield from _parts({**attributes, **module._buffers}, held, DEPTH)


def _parts(values: Mapping[str, Any], held: list[Any], depth: int) -> Iterator[Any]:
    for name, value in values.items():
        if is_constant(value) or (isinstance(value, list | tuple | dict | set) and len(value) < LONG):
            yield name, repr(value)
        elif isinstance(value, Tensor):
            held.append(value)
            yield name, id(value), version(value)
        else:
            held.append(value)
            yield name, id(value), len(value) if isinstance(value, Sized) else 0
            if depth and not isinstance(value, nn.Module):
                yield from _parts(getattr(value, "__dict__", {}), held, depth - 1)


_REGISTERED = ("_parameters", "_buffers", "_modules")
