"""Containers inside containers, as one sequence of layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..module._container import is_plain
from ..module._names import Flattened, Part
from ..module._partition import expect_sequential
from ._residual import Residual, ends


class Inner(Part):
    """A layer that was inside of a container."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.net(*args, **kwargs)


def flatten_nested(module: nn.Sequential) -> nn.Sequential:
    """``module`` with the layers of the containers in it as its own layers, between which a pipe may be cut.

    Replaced are ``nn.Sequential`` and :class:`Residual`, at any depth, unless they have a ``forward`` of their own, or
    hooks.

    Args:
        module: its layers are shared with the result, so that training one trains the other.

    Returns:
        The layers, in order. A layer at the path ``a.b`` is called ``a_b``; in ``state_dict()``, also in that of a
        pipe, its parameters keep their names.

    Raises:
        TypeError: ``module`` is not an ``nn.Sequential``, or does more than compute its layers in order.

    >>> model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(), nn.Linear(2, 1))
    >>> flat = flatten_nested(model)
    >>> list(dict(flat.named_children()))
    ['0_0', '0_1', '2']
    >>> list(flat.state_dict())
    ['0.0.weight', '0.0.bias', '2.weight', '2.bias']
    """
    expect_sequential(module)
    flat = Flattened()
    for path, layer in _opened(module):
        title = path.replace(".", "_")
        # If there is another layer called "a_b", that one keeps its name.
        while title in flat._modules or (title != path and title in module._modules):
            title += "_"
        flat._modules[title] = layer
    flat.training = module.training
    return flat.of(module)


Named = tuple[str, nn.Module]


def _opened(container: nn.Module, around: str = "") -> Iterator[Named]:
    """The layers of a container, each with its path in the outermost container."""
    for name, child in container._modules.items():
        if child is not None:
            yield from _layers(child, around + name)


def _layers(module: nn.Module, path: str) -> Iterator[Named]:
    if isinstance(module, nn.Sequential) and is_plain(module):
        yield from _opened(module, f"{path}.")
    elif isinstance(module, Residual) and is_plain(module, known=(Residual,)):
        yield from _around(module, path)
    else:
        # A layer of the outermost container has its name already; one from inside carries the path for state dicts.
        yield path, _inner(module, path) if "." in path else module


def _around(block: Residual, path: str) -> Iterator[Named]:
    fork, join = ends(block)
    yield f"{path}.fork", fork
    for name, layer in block.body():
        yield from _layers(layer, f"{path}.{name}")
    yield f"{path}.join", _inner(join, path)


def _inner(layer: nn.Module, path: str) -> Inner:
    inner = Inner(layer, path)
    inner.training = layer.training
    return inner
