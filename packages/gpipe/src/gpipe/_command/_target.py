"""Models and samples by name, as command lines take them.

A model is ``package.module:build``: a module of PyTorch, or a function that makes one. A sample is a shape,
``64,3,224,224``, with a dtype and a bound if it needs them, ``8,128:int64:50257``, and the name of the argument if it
has one, ``input_ids=8,128:int64:50257``; or ``package.module:function``, which makes it.
"""

from __future__ import annotations

import importlib
import operator
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_SHAPE = re.compile(r"(?:(?P<name>\w+)=)?(?P<shape>\d+(?:,\d+)*)(?::(?P<dtype>\w+))?(?::(?P<below>\d+))?")


def load(path: str, what: str) -> Any:
    """The object that ``package.module:name`` names. Modules in the working directory are found too.

    Args:
        path: the name.
        what: the argument, for errors.

    Returns:
        The object.

    Raises:
        ValueError: ``path`` is no such text.
        ImportError, AttributeError: there is no such module, or no such name in it.
    """
    module, _, name = path.partition(":")
    if not (module and name):
        raise ValueError(f"{what}: expected package.module:name, got {path!r}")
    if os.getcwd() not in sys.path:  # where `python -m` looks, and a console script does not
        sys.path.insert(0, os.getcwd())
    return operator.attrgetter(name)(importlib.import_module(module))


def model_of(path: str) -> nn.Module:
    """The model that ``package.module:build`` names or returns."""
    found = load(path, "target")
    model = found() if callable(found) and not isinstance(found, nn.Module) else found
    if not isinstance(model, nn.Module):
        raise TypeError(f"target: expected {path!r} to be or to return an nn.Module, got {type(model).__name__}")
    return model


def sample_of(texts: Sequence[str], what: str = "sample") -> Any:
    """The sample that ``texts`` describe: a random tensor, a dict of tensors if they have names, a tuple if several.

    >>> sample_of(["4,3"]).shape
    torch.Size([4, 3])
    >>> sample_of(["tokens=2,5:int64:10"])["tokens"].dtype
    torch.int64
    """
    # A shape with a dtype has a colon too.
    if len(texts) == 1 and ":" in texts[0] and _SHAPE.fullmatch(texts[0]) is None:
        return load(texts[0], what)()
    parsed = [_tensor(text, what) for text in texts]
    names = [name for name, _ in parsed if name is not None]
    if len(set(names)) != len(names) or len(names) not in (0, len(parsed)):
        raise ValueError(f"{what}: expected names for all arguments, or none, each once; got {' '.join(texts)}")
    tensors = [tensor for _, tensor in parsed]
    if names:
        return dict(zip(names, tensors, strict=True))
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def _tensor(text: str, what: str) -> tuple[str | None, Tensor]:
    match = _SHAPE.fullmatch(text)
    dtype = getattr(torch, (match["dtype"] if match else None) or "float32", None)
    whole = isinstance(dtype, torch.dtype) and not (dtype.is_floating_point or dtype.is_complex)
    if match is None or not isinstance(dtype, torch.dtype) or (match["below"] and not whole):
        raise ValueError(
            f"{what}: expected a shape such as 64,3,224,224, one with a name, a dtype and a bound for whole numbers, "
            f"such as input_ids=8,128:int64:50257, or package.module:function; got {text!r}"
        )
    shape = [int(size) for size in match["shape"].split(",")]
    if whole:
        return match["name"], torch.randint(int(match["below"] or 2), shape, dtype=dtype)
    return match["name"], torch.randn(shape, dtype=dtype)
