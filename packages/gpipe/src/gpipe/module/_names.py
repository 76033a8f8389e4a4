"""Keep the parameter names of a model in the state dicts of layers that were taken out of it."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor, nn


class Part(nn.Module):
    """A layer that was taken out of a model. In state dicts its module ``net`` keeps its name in the model.

    Args:
        net: the module.
        path: the name of ``net`` in the model.
    """

    def __init__(self, net: nn.Module, path: str) -> None:
        super().__init__()
        self.net = net
        self.path = path

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return the state dict under the model's names: ``path`` replaces the name of this layer in ``prefix``."""
        around = prefix[:-1].rpartition(".")[0]
        names = [name for name in (around, self.path) if name]
        prefix = "".join(f"{name}." for name in names)
        return self.net.state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)

    def own_names(self) -> dict[str, str]:
        """Map the names of state dict entries in the model to their names in this layer."""
        around = f"{self.path}." if self.path else ""
        return {around + name: f"net.{name}" for name in self.net.state_dict(keep_vars=True)}


def divide_names(layers: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Rename the entries of ``state`` that belong to a :class:`Part` in ``layers`` from model names to layer names."""
    found: dict[str, Any] = {}
    known: set[str] = set()
    for name, layer in layers._modules.items():
        if isinstance(layer, Part):
            for outside, inside in layer.own_names().items():
                if prefix + outside in state:
                    found[f"{prefix}{name}.{inside}"] = state[prefix + outside]
                    known.add(prefix + outside)
    for name in known:
        del state[name]
    state.update(found)


class Flattened(nn.Sequential):
    """The layers of a model, under its parameter names. ``model`` is None if some layers are missing."""

    model: nn.Module | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Put the model first, so that deepcopy copies it before the layers that refer to it."""
        return {"model": self.model, **vars(self)}

    def __getitem__(self, index: Any) -> Any:
        found: Any = super().__getitem__(index)
        is_all = isinstance(found, Flattened) and [*found] == [*self]
        return found.of(self.model) if is_all else found

    def train(self, mode: bool = True) -> Flattened:
        """Set the mode of the layers, then the model's, whose own ``train()`` may keep norms in evaluation mode."""
        super().train(mode)
        if self.model is not None:
            self.model.train(mode)
        return self

    def of(self, model: nn.Module | None) -> Flattened:
        self.__dict__["model"] = model
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        divide_names(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def extract_model(layers: nn.Module, partitions: Iterable[nn.Module]) -> nn.Module | None:
    """Return the model of ``layers``, reduced to the modules in ``partitions``, in the order of the model.

    Returns:
        The model itself if all its parameters are in ``partitions``; None if ``layers`` has no model, or a parameter of
        ``partitions`` is not in it.
    """
    model = layers.model if isinstance(layers, Flattened) else None
    partitions = list(partitions)
    modules = {module for partition in partitions for module in partition.modules()}
    parameters = {parameter for partition in partitions for parameter in partition.parameters()}
    if model is None or not parameters <= {*model.parameters()}:
        return None
    if not any(parameter not in parameters for parameter in model.parameters()):
        return model
    return _extract_part(model, modules, parameters | {buffer for each in partitions for buffer in each.buffers()})


def _extract_part(module: nn.Module, modules: Collection[nn.Module], tensors: Collection[Tensor]) -> nn.Module | None:
    """Return ``module`` if it is in ``modules``, else a copy reduced to ``modules`` and ``tensors``; None if empty."""
    if module in modules:
        return module
    part = _make_shallow_copy(module)
    for name, child in module._modules.items():
        found = None if child is None else _extract_part(child, modules, tensors)
        if found is None:
            del part._modules[name]
        else:
            part._modules[name] = found
    for own in (part._parameters, part._buffers):
        for name in [name for name, tensor in own.items() if tensor not in tensors]:
            del own[name]
    return part if part._modules or part._parameters or part._buffers else None


def _make_shallow_copy(module: nn.Module) -> nn.Module:
    """Return a shallow copy with the same tensors, children and hooks, but separate dicts and sets."""
    shell: nn.Module = object.__new__(type(module))  # copy.copy raises for some classes, such as parametrized ones
    for name, value in vars(module).items():
        is_own = isinstance(value, dict | set) and name.startswith("_")
        vars(shell)[name] = copy.copy(value) if is_own else value
    return shell
