"""Map the layers of a pipe to the model they belong to: its modules, under their original names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from .._names import Part

Layers = Mapping[str, nn.Module]


class Own(nn.Module):
    """The parameters and buffers of the module ``of``, without its children."""

    of: nn.Module

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        # Shares the dicts, and so the tensors. nn.Module.__setattr__ would register ``of`` as a child.
        vars(self).update({name: vars(of)[name] for name in _TENSORS}, of=of, training=of.training)


_TENSORS = ("_parameters", "_buffers", "_non_persistent_buffers_set")


class Owned(NamedTuple):
    """A module of a layer.

    Attributes:
        path: the name of the module in the model.
        owner: the innermost module with a method ``_init_weights(module)``, as in Hugging Face models, that contains
            this one or is this one; None if there is none.
    """

    path: str
    module: nn.Module
    owner: Any

    def get_path(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for own in (self.module._parameters, self.module._buffers):
            for name, tensor in own.items():
                if tensor is not None:
                    yield name, tensor

    def find_computed(self) -> Iterator[Tensor]:
        return (tensor for name, tensor in self.tensors() if name in self.module._non_persistent_buffers_set)


def iterate_modules(layers: Layers) -> Iterator[Owned]:
    """Iterate over the modules of all layers, children before their parents, as in ``nn.Module.apply``."""
    for name in layers:
        yield from modules_of_layer(layers, name)


def modules_of_layer(layers: Layers, name: str) -> Iterator[Owned]:
    layer = layers[name]
    if isinstance(layer, Part):
        return _walk(layer.path, layer.net, _owner_around(layers, layer.path))
    if isinstance(layer, Own):
        return iter([Owned(name, layer.of, layer.of if _initializes(layer.of) else _owner_around(layers, name))])
    return _walk(name, layer, _owner_around(layers, name))


def _walk(path: str, module: nn.Module, owner: Any) -> Iterator[Owned]:
    owner = module if _initializes(module) else owner
    for name, child in module.named_children():
        yield from _walk(f"{path}.{name}" if path else name, child, owner)
    yield Owned(path, module, owner)


def _initializes(module: nn.Module) -> bool:
    return callable(getattr(type(module), "_init_weights", None))


def _owner_around(layers: Layers, path: str) -> Any:
    """Return the innermost owner above ``path`` in the model, which is the first of ``layers`` if it was divided."""
    first = next(iter(layers.values()))
    module: nn.Module | None = first.of if isinstance(first, Own) else None
    owner = None
    for name in path.split("."):
        if module is None:
            break
        owner = module if _initializes(module) else owner
        module = module._modules.get(name)
    return owner


def get_layer_state(layers: Layers, name: str) -> dict[str, Any]:
    """Return the entries of one layer in the model's state dict."""
    found: dict[str, Any] = layers[name].state_dict(prefix=get_prefix(name), keep_vars=True)
    return found


def get_prefix(name: str) -> str:
    """Return the prefix of the names in a layer; empty for the model itself."""
    return f"{name}." if name else ""
