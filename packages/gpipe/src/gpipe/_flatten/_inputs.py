"""What a model is called with, as one tree."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microbatch import Arguments

from ._tree import Tree, flattened


def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    if inspect.ismethod(function):  # without its object: a model would live as long as the cache
        return _names_of_method(function.__func__)[1:]
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # it has no signature
        return ()
    return tuple(each.name for each in parameters if each.kind == each.POSITIONAL_OR_KEYWORD)


# Every run needs them again.
_names_of_method = lru_cache(maxsize=64)(_names)


class Inputs(NamedTuple):
    """Positional and named arguments of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, value: Any) -> Inputs:
        """The arguments in ``value``: named ones for a mapping, positional ones for a tuple, else one."""
        if isinstance(value, Arguments):
            return cls(tuple(value.args), dict(value.kwargs))
        if isinstance(value, Mapping):
            return cls((), dict(value))
        return cls(value, {}) if type(value) is tuple else cls((value,), {})

    def call(self, model: nn.Module) -> Any:
        return model(*self.args, **self.kwargs)

    def named(self, function: Callable[..., Any]) -> dict[str, Any]:
        """The arguments by the names that ``function`` has for them, as far as it has any."""
        return {**dict(zip(_names(function), self.args, strict=False)), **self.kwargs} if self.args else self.kwargs

    def leaves(self) -> tuple[list[Any], Tree]:
        """The leaves, and what puts them together again: ``Inputs(*tree.value(leaves))``."""
        return flattened((self.args, self.kwargs))

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves()[0] if isinstance(leaf, Tensor)]

    def rows(self) -> int:
        return next((tensor.shape[0] for tensor in self.tensors() if tensor.dim()), 0)

    def twice(self) -> Iterator[Inputs]:
        """With all rows a second time, of all that may have rows; then, if that fails, of what has exactly as many."""
        rows = self.rows()
        leaves, tree = self.leaves()
        for exactly in (False, True):
            found = [torch.cat([leaf, leaf]) if _has_rows(leaf, rows, exactly) else leaf for leaf in leaves]
            yield Inputs(*tree.value(found))


def _has_rows(leaf: Any, rows: int, exactly: bool) -> bool:
    """Whether ``leaf`` is a tensor with so many rows or, unless ``exactly`` as many, with several for each of them."""
    if not isinstance(leaf, Tensor) or not leaf.dim():
        return False
    return len(leaf) == rows if exactly else len(leaf) % max(1, rows) == 0
