"""Which layers are equal for a count that depends on shapes only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from microbatch import Batch, flatten

from ._loose import Loose
from ._storages import storages

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)


def situation(layer: nn.Module, value: Batch, loose: Sequence[Loose]) -> Hashable | None:
    """A key of all that a count without data depends on; None if other things may matter too, such as skips.

    Two layers have the same key if their classes and attributes are equal (so they have no hooks of their own), and if
    their tensors have the same shapes, strides and dtypes and are shared in the same way. Objects of other classes are
    equal if they are the same object.

    Args:
        layer: the layer of the model, which must stay alive.
        value: the input of the layer.
        loose: the storages of the input that no earlier layer needs.
    """
    if any(hasattr(child, "route_skips") for child in layer.modules()):
        return None
    leaves, tree = flatten(value.value)
    found = _Forms(layer.modules())
    try:
        hash(tree)
    except TypeError:
        return None
    return found.of_modules(layer), tuple(map(found.of, leaves)), tree, tuple(loose)


class _Forms:
    """Describes tensors and objects; one that was described before by its number."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._numbers = {id(module): k for k, module in enumerate(modules)}

    def of_modules(self, layer: nn.Module) -> Hashable:
        return tuple((type(child), self.of(vars(child))) for child in layer.modules())

    def of(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if isinstance(value, nn.Module) or id(value) in self._numbers:
            return kind, self._numbers.get(id(value), id(value)), id(value) in self._numbers
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            return self._of_tensor(value)
        if kind in (tuple, list):
            return kind, *map(self.of, self._numbered(value))
        if kind in (set, frozenset):
            return kind, frozenset(map(self.of, value))
        if kind in (dict, OrderedDict):
            return kind, *map(self.of, chain.from_iterable(self._numbered(value).items()))
        return kind, id(value)

    def _of_tensor(self, x: torch.Tensor) -> Hashable:
        memory = [self._number(storage._cdata) for storage in storages(x)]
        self._numbered(x)
        return type(x), x.shape, x.stride(), x.dtype, x.requires_grad, *memory

    def _numbered(self, value: Any) -> Any:
        self._number(id(value))
        return value

    def _number(self, key: int) -> int:
        return self._numbers.setdefault(key, len(self._numbers))
