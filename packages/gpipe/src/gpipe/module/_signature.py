"""Create the class of a pipe: a subclass whose ``forward`` has the first layer's signature.

Frameworks read argument names from it: Hugging Face's ``Trainer`` keeps the data set columns that are in
``inspect.signature(model.forward)``, finds label names in the signature of ``type(model).forward``, and recognizes
question-answering models by the name of their class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType
from typing import Any, TypeVar

from torch import nn

from ..skip import Skippable
from ..skip.skippable import own_forward

Module = TypeVar("Module", bound=nn.Module)


def class_for(
    kind: type[Module], forward: Callable[..., Any], first: nn.Module | None, *, is_model: bool = False
) -> type[Module]:
    """Return a subclass of ``kind`` whose ``forward`` has the signature of the forward of ``first``.

    Its name is the name of ``kind``, followed by the model's if ``is_model``: ``GPipeOfBertForQuestionAnswering``. If
    ``kind`` overrides ``forward``, it is returned unchanged.

    Args:
        kind: the class of the pipe.
        forward: the ``forward`` that ``kind`` has unless it overrides it.
        first: the first layer, or the model; None for an empty pipe.
        is_model: whether ``first`` is a model.
    """
    kind = vars(kind).get("_plain_class", kind)
    signature = None if first is None else get_signature(first)
    if signature is None or kind.forward is not forward:
        return kind
    suffix = f"Of{type(first).__name__}" if is_model else ""
    # One class per signature and name, so that a pipe and its copy have the same type.
    key = kind, str(signature), suffix
    if key not in _classes:
        members = {
            "forward": _with_signature(kind.forward, signature),
            "_plain_class": kind,
            "__reduce__": _reduce,
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__ + suffix,
            "__doc__": kind.__doc__,
        }
        _classes[key] = type(kind.__name__ + suffix, (kind,), members)
    return _classes[key]


_classes: dict[tuple[type, str, str], type[Any]] = {}


def _with_signature(function: Callable[..., Any], signature: inspect.Signature) -> FunctionType:
    """Return a copy of the method ``function`` with the given ``signature``."""
    assert isinstance(function, FunctionType)
    # Not functools.wraps: a wrapper would add a frame, which torch.compile traces.
    twin = FunctionType(function.__code__, function.__globals__, function.__name__, None, function.__closure__)
    twin.__dict__.update(function.__dict__)
    twin.__doc__, twin.__module__, twin.__qualname__ = function.__doc__, function.__module__, function.__qualname__
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    twin.__signature__ = signature.replace(parameters=[itself, *signature.parameters.values()])  # type: ignore[attr-defined]
    return twin


def get_signature(layer: nn.Module) -> inspect.Signature | None:
    compiled: nn.Module = getattr(layer, "_orig_mod", layer)
    own = own_forward(compiled) if isinstance(compiled, Skippable) else compiled.forward
    with suppress(TypeError, ValueError):
        return inspect.signature(own)
    return None


def binds(signature: inspect.Signature, /, *args: Any, **kwargs: Any) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _reduce(pipe: nn.Module) -> tuple[Any, ...]:
    """Pickle and copy with the original class; the subclass is recreated once the layers are restored."""
    return _new, (type(pipe)._plain_class,), pipe.__getstate__()  # type: ignore[attr-defined,no-untyped-call]


def _new(kind: type[Module]) -> Module:
    return kind.__new__(kind)
