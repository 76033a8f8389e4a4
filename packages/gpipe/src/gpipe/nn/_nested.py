"""Flatten nested containers into one sequence of layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..module._container import is_plain
from ..module._names import Flattened, Part
from ..module._partition import expect_sequential
from ._residual import Residual, ends


class Inner(Part):
    """A layer from inside a container."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.net(*args, **kwargs)


def flatten_nested(module: nn.Sequential) -> nn.Sequential:
    """Flatten nested containers into a single sequence of layers, which a pipe can split anywhere.

    Instances of ``nn.Sequential`` and :class:`Residual` are replaced by their layers, at any depth, unless they have a
    custom ``forward`` or hooks.

    Args:
        module: the nested layers. The result shares them, so that training one trains the other.

    Returns:
        The layers, in order. A layer at the path ``a.b`` is called ``a_b``; in ``state_dict()``, even of a pipe, its
        parameters keep their names.

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
    for path, layer in _unnest(module):
        title = path.replace(".", "_")
        # If the module already has a layer called "a_b", that layer keeps the name.
        while title in flat._modules or (title != path and title in module._modules):
            title += "_"
        flat._modules[title] = layer
    flat.training = module.training
    return flat.of(module)


Named = tuple[str, nn.Module]


def _unnest(container: nn.Module, around: str = "") -> Iterator[Named]:
    """Yield the layers of a container, each with its path in the outermost container."""
    for name, child in container._modules.items():
        if child is not None:
            yield from _layers(child, around + name)


def _layers(module: nn.Module, path: str) -> Iterator[Named]:
    if isinstance(module, nn.Sequential) and is_plain(module):
        yield from _unnest(module, f"{path}.")
    elif isinstance(module, Residual) and is_plain(module, known=(Residual,)):
        yield from _around(module, path)
    else:
        # A layer of the outermost container keeps its name; a nested layer stores its path for state dicts.
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
