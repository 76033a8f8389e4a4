"""The arguments that a model is called with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from torch import nn

from microbatch import Arguments


def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    if inspect.ismethod(function):  # without its object, because the cache would keep the model alive
        return _names_of_method(function.__func__)[1:]
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # no signature
        return ()
    return tuple(each.name for each in parameters if each.kind == each.POSITIONAL_OR_KEYWORD)


# Cached, because every run needs them.
_names_of_method = lru_cache(maxsize=64)(_names)


class Inputs(NamedTuple):
    """The positional and keyword arguments of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, value: Any) -> Inputs:
        """Return the arguments in ``value``: keywords for a mapping, positional ones for a tuple, else a single one."""
        if isinstance(value, Arguments):
            return cls(tuple(value.args), dict(value.kwargs))
        if isinstance(value, Mapping):
            return cls((), dict(value))
        return cls(value, {}) if type(value) is tuple else cls((value,), {})

    def call(self, model: nn.Module) -> Any:
        return model(*self.args, **self.kwargs)

    def to_dict(self, function: Callable[..., Any]) -> dict[str, Any]:
        """Return a dict of all arguments; positional ones get their parameter names in ``function``, or are omitted."""
        return {**dict(zip(_names(function), self.args, strict=False)), **self.kwargs} if self.args else self.kwargs
