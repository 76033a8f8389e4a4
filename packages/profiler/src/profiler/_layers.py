"""The layers of a module to profile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from ._arguments import check_not_empty, check_not_lazy


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
    check_not_empty(chain)
    check_not_lazy(chain)
    return chain


def _named(module: nn.Module, layers: Sequence[str] | None) -> dict[str, nn.Module]:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected nn.Sequential, got {type(module).__name__}; wrap the layers in one")
    if layers is not None:
        return {name: _submodule(module, name) for name in _names(layers)}
    if not isinstance(module, nn.Sequential) and not _is_chain(module):
        raise TypeError(
            f"module: expected nn.Sequential, got {type(module).__name__}; wrap the layers in one, or name those that "
            "run one after the other: layers=[...]"
        )
    return {name: child for name, child in module._modules.items() if child is not None}


def _is_chain(module: nn.Module) -> bool:
    computes = type(module).forward is not nn.Module.forward  # a ModuleList does not
    return (
        computes
        and isinstance(module, Iterable)
        and list(module) == [child for child in module._modules.values() if child]
    )


def _names(layers: Sequence[str]) -> Sequence[str]:
    if isinstance(layers, str):
        raise TypeError(f"layers: expected a list of names, got a str; write layers=[{layers!r}]")
    if len(set(layers)) < len(layers):
        raise ValueError(f"layers: expected each name once, got {list(layers)}")
    return layers


def _submodule(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except (AttributeError, TypeError):
        names = ", ".join(name for name, _ in module.named_children())
        raise ValueError(f"layers: module has no submodule {name!r}; its children are {names}") from None
