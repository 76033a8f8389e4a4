"""The class of a pipe, whose ``forward`` has the signature of the first layer's.

Frameworks read names of arguments there: Hugging Face's ``Trainer`` keeps the columns of a data set that
``inspect.signature(model.forward)`` names, finds labels in the signature of ``type(model).forward``, and knows by the
name of the class of models that answer questions.
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
    """A subclass of ``kind`` whose ``forward`` has the signature of that of the ``first`` layer, or of a model.

    Its name is that of ``kind``, and of a model also that of the model: ``GPipeOfBertForQuestionAnswering``.
    A class with a ``forward`` of its own is returned as it is.
    """
    kind = vars(kind).get("_plain_class", kind)
    signature = None if first is None else signature_of(first)
    if signature is None or kind.forward is not forward:
        return kind
    suffix = f"Of{type(first).__name__}" if is_model else ""
    # One class for equal signatures and names, so that a pipe and its copy are of one type.
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
    """A copy of the method ``function`` with another ``signature``."""
    assert isinstance(function, FunctionType)
    # Not functools.wraps: a function around it would be one more frame, which torch.compile traces.
    twin = FunctionType(function.__code__, function.__globals__, function.__name__, None, function.__closure__)
    twin.__dict__.update(function.__dict__)
    twin.__doc__, twin.__module__, twin.__qualname__ = function.__doc__, function.__module__, function.__qualname__
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    twin.__signature__ = signature.replace(parameters=[itself, *signature.parameters.values()])  # type: ignore[attr-defined]
    return twin


def signature_of(layer: nn.Module) -> inspect.Signature | None:
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
    """Pickles and copies name the original class; the subclass is made when the layers are there."""
    return _new, (type(pipe)._plain_class,), pipe.__getstate__()  # type: ignore[attr-defined,no-untyped-call]


def _new(kind: type[Module]) -> Module:
    return kind.__new__(kind)
