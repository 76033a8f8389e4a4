"""What a model is called with, as one tree."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from microbatch import Arguments

from ._tree import Tree, flattened


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
        if not self.args:
            return self.kwargs
        try:
            bound = inspect.signature(function).bind_partial(*self.args)
        except (TypeError, ValueError):  # more than it takes, which it will say itself; or it has no signature
            return self.kwargs
        return {**bound.arguments, **self.kwargs}

    def leaves(self) -> tuple[list[Any], Tree]:
        """The leaves, and what puts them together again: ``Inputs(*tree.value(leaves))``."""
        return flattened((self.args, self.kwargs))

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves()[0] if isinstance(leaf, Tensor)]
