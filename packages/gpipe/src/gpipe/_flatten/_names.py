"""A model keeps the names of its parameters in state dicts, although it is divided into layers."""

from __future__ import annotations

from typing import Any

from torch import nn


class Part(nn.Module):
    """A layer of a flattened model. In state dicts its module ``net`` has the name that it has in the model.

    Args:
        net: a part of the model.
        path: its name in the model; empty if it is the model itself, without what belongs to other layers.
    """

    def __init__(self, net: nn.Module, path: str) -> None:
        super().__init__()
        self.net = net
        self.path = path

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """As of any module, under the model's own names: ``prefix`` is that of this layer, and is left out."""
        around = prefix[:-1].rpartition(".")[0]
        names = [name for name in (around, self.path) if name]
        prefix = "".join(f"{name}." for name in names)
        return self.net.state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)

    def own_names(self) -> dict[str, str]:
        """For each entry of the state dict, as it is called in the model, its name in this layer."""
        around = f"{self.path}." if self.path else ""
        return {around + name: f"net.{name}" for name in self.net.state_dict(keep_vars=True)}


def model_of(layer: nn.Module | None) -> nn.Module | None:
    """The model that ``layer`` is a segment of, with stand-ins for all that belongs elsewhere; None if it is none."""
    return layer.net if isinstance(layer, Part) and not layer.path else None


def no_child_of_the_model(name: str) -> str:
    """The error message for a module that is looked up in a pipe by the name that it has in the model."""
    return (
        f"a pipe has layers, such as pipe[0], and no {name!r}; the model that it was made of still has it, with "
        "the same parameters: use that, as in torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer)"
    )


def divide_names(layers: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Rename the entries of ``state`` that belong to flattened parts of ``layers`` to what these are loaded by."""
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
    """The layers of a flattened model; its state dict has the model's names."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        divide_names(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
