"""The layers of a module to profile."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


def layers_of(module: nn.Module) -> nn.Sequential:
    """The layers of ``module`` in the order in which they run, with their names.

    Args:
        module: an ``nn.Sequential``, or a module with a ``forward`` that iterates over its own children, as ``GPipe``.

    Raises:
        TypeError: it is neither.
        ValueError: there are no layers, or a parameter is lazy.
    """
    if not isinstance(module, nn.Sequential) and not _is_chain(module):
        raise TypeError(f"module: expected nn.Sequential, got {type(module).__name__}; wrap the layers in one")
    chain = nn.Sequential()
    # Not by add_module, which refuses names with dots.
    chain._modules.update({name: child for name, child in module._modules.items() if child is not None})
    if not chain:
        raise ValueError("module: expected at least one layer, got an empty nn.Sequential")
    for name, tensor in (*chain.named_parameters(), *chain.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"module: {name!r} is lazy and has no size yet; run the module once on a sample, then try again"
            )
    return chain


def _is_chain(module: nn.Module) -> bool:
    # A ModuleList computes nothing.
    if not isinstance(module, nn.Module) or type(module).forward is nn.Module.forward:
        return False
    return isinstance(module, Iterable) and list(module) == [child for child in module._modules.values() if child]


def owned(layers: Iterable[nn.Module]) -> list[tuple[list[nn.Parameter], list[Tensor]]]:
    """The parameters and buffers of each layer. What several layers share belongs to the first: sums count it once."""
    seen: set[int] = set()
    found = []
    for layer in layers:
        parameters = [p for p in layer.parameters() if id(p) not in seen]
        buffers = [b for b in layer.buffers() if id(b) not in seen]
        seen.update(map(id, (*parameters, *buffers)))
        found.append((parameters, buffers))
    return found
