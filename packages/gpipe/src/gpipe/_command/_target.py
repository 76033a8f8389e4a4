"""Models and samples by name, as command lines take them.

A model is ``package.module:build``: a module of PyTorch, or a function without arguments that makes one. A sample is a
shape, ``64,3,224,224``, with a dtype and a bound if it needs them, ``8,128:int64:50257``, and the name of the argument
if it has one, ``input_ids=8,128:int64:50257``; or ``package.module:function``, which makes it.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["UnusableError", "load", "model_of", "sample_of"]

_SHAPE = re.compile(r"(?:(?P<name>\w+)=)?(?P<shape>\d+(?:,\d+)*)(?::(?P<dtype>\w+))?(?::(?P<below>\d+))?")
_EXPECTED = (
    "expected a shape such as 64,3,224,224, one with a name, a dtype and what values are below, such as "
    "input_ids=8,128:int64:50257, or package.module:function"
)


class UnusableError(ValueError):
    """An argument of a command cannot be used: there is no such name, a function fails, or a shape is invalid."""


def load(path: str, what: str = "target") -> Any:
    """The object that ``package.module:name`` names. Modules in the working directory are found too.

    Args:
        path: the module, a colon, and a name in it, which may have dots.
        what: the name of the argument, for errors.

    Returns:
        The object.

    Raises:
        UnusableError: there is no such module or name, or importing the module fails.
    """
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise UnusableError(f"{what}: expected package.module:name, got {path!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a script may call exit() when it is imported
        raise UnusableError(f"{what}: cannot import {module!r}: {type(error).__name__}: {error}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise UnusableError(f"{what}: {module!r} has no {name!r}")
        found = getattr(found, part)
    return found


def model_of(path: str) -> nn.Module:
    """The model that ``package.module:build`` names or returns.

    Args:
        path: the path of an ``nn.Module``, or of a function without arguments that returns one.

    Returns:
        The model.

    Raises:
        UnusableError: as for :func:`load`; or the function fails, or does not return an ``nn.Module``.
    """
    found = load(path)
    if not isinstance(found, nn.Module):
        found = _called(found, path, "target")
    if not isinstance(found, nn.Module):
        raise UnusableError(f"target: expected {path!r} to give an nn.Module, got {type(found).__name__}")
    return found


def sample_of(texts: Sequence[str], what: str = "sample") -> Any:
    """The sample that ``texts`` describe: a random tensor, a dict of tensors if they have names, a tuple if there are
    several.

    Args:
        texts: one text for each argument of the model.
        what: the name of the argument, for errors.

    Returns:
        A tensor, a dict of tensors by name, or a tuple of them.

    Raises:
        UnusableError: a text cannot be parsed, or only some have names.

    >>> sample_of(["4,3"]).shape
    torch.Size([4, 3])
    >>> sample_of(["tokens=2,5:int64:10"])["tokens"].dtype
    torch.int64
    """
    if len(texts) == 1 and ":" in texts[0] and _SHAPE.fullmatch(texts[0]) is None:
        return _called(load(texts[0], what), texts[0], what)
    parsed = [_tensor(text, what) for text in texts]
    names = [name for name, _ in parsed if name is not None]
    if len(set(names)) != len(names) or len(names) not in (0, len(parsed)):
        raise UnusableError(f"{what}: expected names for all arguments, or none, each once; got {' '.join(texts)}")
    tensors = [tensor for _, tensor in parsed]
    if names:
        return dict(zip(names, tensors, strict=True))
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def _called(function: Any, path: str, what: str) -> Any:
    if not callable(function):
        raise UnusableError(f"{what}: expected {path!r} to be a function or a module, got {type(function).__name__}")
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise UnusableError(f"{what}: {path}() fails: {type(error).__name__}: {error}") from error


def _tensor(text: str, what: str) -> tuple[str | None, Tensor]:
    match = _SHAPE.fullmatch(text)
    dtype = getattr(torch, (match["dtype"] if match else None) or "float32", None)
    if match is None or not isinstance(dtype, torch.dtype):
        raise UnusableError(f"{what}: {_EXPECTED}; got {text!r}")
    if match["below"] and (int(match["below"]) < 1 or dtype.is_floating_point or dtype.is_complex):
        raise UnusableError(f"{what}: expected values below a positive number, of a dtype of integers, got {text!r}")
    try:
        return match["name"], _random([int(size) for size in match["shape"].split(",")], dtype, match["below"])
    except (RuntimeError, ValueError, TypeError, OverflowError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise UnusableError(f"{what}: cannot make a tensor of {text!r}: {reason}") from error


def _random(shape: list[int], dtype: torch.dtype, below: str | None) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype)
    return torch.randint(int(below or 2), shape, dtype=dtype)
