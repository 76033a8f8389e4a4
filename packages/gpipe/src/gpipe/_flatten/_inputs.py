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
        """With all rows a second time: of all tensors that may have rows; of those with exactly as many; of any.

        The first of these with which the model runs is right: a mask for all rows must not grow, and tensors with a
        number of their own for each row, as of pictures, must.
        """
        rows = self.rows()
        leaves, tree = self.leaves()
        for has_rows in (lambda size: size % max(1, rows) == 0, rows.__eq__, lambda size: True):
            grows = [isinstance(leaf, Tensor) and leaf.dim() and has_rows(len(leaf)) for leaf in leaves]
            found = [torch.cat([leaf, leaf]) if more else leaf for leaf, more in zip(leaves, grows, strict=True)]
            yield Inputs(*tree.value(found))
