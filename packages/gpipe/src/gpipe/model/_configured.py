"""What decides how a model computes its loss, besides the arguments: modes, attributes and configurations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ..values._constants import is_constant

_HELD = ("_parameters", "_buffers", "_modules")


def configured(model: nn.Module, blocks: Iterable[nn.Module]) -> int:
    """Return a number that is likely to change with any attribute of a module outside ``blocks``, or a hook on it."""
    inside = {module for block in blocks for module in block.modules()}
    parts = [part for module in model.modules() if module not in inside for part in _parts(vars(module))]
    return hash(tuple(parts))


def _parts(values: Mapping[str, Any]) -> Iterator[Any]:
    for name, value in values.items():
        if name in _HELD or isinstance(value, Tensor):
            continue
        if is_constant(value) or isinstance(value, list | tuple | dict | set):
            yield name, repr(value)
        elif name.endswith("config") and hasattr(value, "__dict__"):
            yield from _parts(vars(value))
        else:
            yield name, id(value)
