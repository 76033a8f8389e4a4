"""Parse the models and samples named on a command line.

A model is ``package.module:build``: an ``nn.Module``, or a function that returns one. A sample is a shape,
``64,3,224,224``, optionally with a dtype and an exclusive upper bound, ``8,128:int64:50257``, and with the name of an
argument, ``input_ids=8,128:int64:50257``; or ``package.module:function``, which returns the sample.
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
    """Import the object ``package.module:name``. Modules in the working directory can be imported as well.

    Args:
        path: the module and the name.
        what: the name of the argument in errors.

    Returns:
        The object.

    Raises:
        ValueError: ``path`` does not have this form.
        ImportError, AttributeError: the module, or the name in it, does not exist.
    """
    module, _, name = path.partition(":")
    if not (module and name):
        raise ValueError(f"{what}: expected package.module:name, got {path!r}")
    if os.getcwd() not in sys.path:  # `python -m` adds it, but a console script does not
        sys.path.insert(0, os.getcwd())
    return operator.attrgetter(name)(importlib.import_module(module))


def load_model(path: str) -> nn.Module:
    """Return the model ``package.module:build``, or the model that this function returns."""
    found = load(path, "target")
    model = found() if callable(found) and not isinstance(found, nn.Module) else found
    if not isinstance(model, nn.Module):
        raise TypeError(f"target: expected {path!r} to be or to return an nn.Module, got {type(model).__name__}")
    return model


def create_sample(texts: Sequence[str], what: str = "sample") -> Any:
    """Create a sample from ``texts``: a random tensor, a tuple if there are several, or a dict if they have names.

    >>> create_sample(["4,3"]).shape
    torch.Size([4, 3])
    >>> create_sample(["tokens=2,5:int64:10"])["tokens"].dtype
    torch.int64
    """
    # A shape with a dtype contains a colon as well.
    if len(texts) == 1 and ":" in texts[0] and _SHAPE.fullmatch(texts[0]) is None:
        return load(texts[0], what)()
    parsed = [_tensor(text, what) for text in texts]
    names = [name for name, _ in parsed if name is not None]
    if len(set(names)) != len(names) or len(names) not in (0, len(parsed)):
        raise ValueError(f"{what}: expected a different name for each argument, or no names; got {' '.join(texts)}")
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
            f"{what}: expected a shape such as 64,3,224,224, a shape with a name, a dtype and an upper bound for "
            f"integers, such as input_ids=8,128:int64:50257, or package.module:function; got {text!r}"
        )
    shape = [int(size) for size in match["shape"].split(",")]
    if whole:
        return match["name"], torch.randint(int(match["below"] or 2), shape, dtype=dtype)
    return match["name"], torch.randn(shape, dtype=dtype)
