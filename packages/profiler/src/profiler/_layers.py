"""The layers of a module to profile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn


def layers_of(module: nn.Module, layers: Sequence[str] | None = None) -> nn.Sequential:
    """The layers of ``module`` in the order in which they run, with their names.

    Args:
        module: an ``nn.Sequential``, or a module with a ``forward`` that iterates over its own children, as ``GPipe``
            does; any module if ``layers`` are given.
        layers: names of submodules, such as ``"encoder.0"``.

    Raises:
        TypeError: it is not known which layers ``module`` has.
        ValueError: there are no layers, ``module`` has no submodule of a given name, or a parameter is lazy.
    """
    chain = nn.Sequential()
    # Not by add_module, which refuses names with dots.
    chain._modules.update(_named(module, layers))
    if not chain:
        raise ValueError("module: expected at least one layer, got an empty nn.Sequential")
    for name, tensor in (*chain.named_parameters(), *chain.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"module: {name!r} is lazy and has no size yet; run the module once on a sample, then try again"
            )
    return chain


def _named(module: nn.Module, layers: Sequence[str] | None) -> dict[str, nn.Module]:
    if layers is not None:
        if isinstance(layers, str):
            raise TypeError(f"layers: expected a list of names, got a str; write layers=[{layers!r}]")
        if len(set(layers)) < len(layers):
            raise ValueError(f"layers: expected each name once, got {list(layers)}")
        return {name: _submodule(module, name) for name in layers}
    if not isinstance(module, nn.Sequential) and not _is_chain(module):
        raise TypeError(
            f"module: expected nn.Sequential, got {type(module).__name__}; wrap the layers in one, or name those that "
            "run one after the other: layers=[...]"
        )
    return {name: child for name, child in module._modules.items() if child is not None}


def _is_chain(module: nn.Module) -> bool:
    # A ModuleList computes nothing.
    if not isinstance(module, nn.Module) or type(module).forward is nn.Module.forward:
        return False
    return isinstance(module, Iterable) and list(module) == [child for child in module._modules.values() if child]


def _submodule(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except (AttributeError, TypeError):
        names = ", ".join(name for name, _ in module.named_children())
        raise ValueError(f"layers: module has no submodule {name!r}; its children are {names}") from None


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
