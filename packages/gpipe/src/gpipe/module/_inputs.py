"""The arguments that a model is called with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from torch import nn

from microbatch import Arguments


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
        """Return the arguments in ``value``: named ones for a mapping, positional ones for a tuple, else one."""
        if isinstance(value, Arguments):
            return cls(tuple(value.args), dict(value.kwargs))
        if isinstance(value, Mapping):
            return cls((), dict(value))
        return cls(value, {}) if type(value) is tuple else cls((value,), {})

    def call(self, model: nn.Module) -> Any:
        return model(*self.args, **self.kwargs)

    def named(self, function: Callable[..., Any]) -> dict[str, Any]:
        """Return the arguments by the names that ``function`` has for them, as far as it has any."""
        return {**dict(zip(_names(function), self.args, strict=False)), **self.kwargs} if self.args else self.kwargs
