"""Find the modules that are the blocks of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from torch import nn

_LISTS = (nn.ModuleList, nn.Sequential)
Trunk = list[str]
"""The names of blocks that are called one after the other, once each."""


def find_trunks(model: nn.Module, called: Sequence[nn.Module], blocks: str | Sequence[str] | None) -> list[Trunk]:
    """The trunks of ``model`` in the order in which they are called; ValueError if there is none.

    Args:
        called: the modules that the model calls, in order, each as often as it is called.
        blocks: the names of the lists to take; None takes the outermost ones whose elements are of one class, or where
            there are none the outermost ``nn.Sequential``s.
    """
    lists = [blocks] if isinstance(blocks, str) else list(blocks or [])
    candidates = [_named(model, name) for name in lists] or list(_outermost(model, _alike))
    candidates = candidates or list(_outermost(model, _in_sequence))
    names = {model.get_submodule(name): name for trunk in candidates for name in trunk}
    order = [names[module] for module in called if module in names]
    fitting = [trunk for trunk in candidates if _in_a_row(trunk, order)]
    if lists and len(fitting) < len(candidates):
        wrong = next(name for name, trunk in zip(lists, candidates, strict=True) if trunk not in fitting)
        raise ValueError(
            f"the elements of {wrong!r} are not called once each and in their order; leave it out of blocks"
        )
    if not fitting:
        raise ValueError(
            f"{type(model).__name__} has no list of blocks that are called once each and in order"
            f"{_called_again(model, called)}; name the ModuleList or Sequential that holds them, "
            "GPipe(model, sample=sample, blocks=...), or write the model as an nn.Sequential"
        )
    return sorted(fitting, key=lambda trunk: order.index(trunk[0]))


def _called_again(model: nn.Module, called: Sequence[nn.Module]) -> str:
    """The element of a list that is called several times."""
    lists = [(name, each) for name, each in model.named_modules() if isinstance(each, _LISTS)]
    counts = Counter(called)
    for path, each in lists:
        for name, child in each.named_children():
            if counts[child] > 1:
                return f": '{path}.{name}' is called {counts[child]} times"
    return ""


def _named(model: nn.Module, name: str) -> Trunk:
    try:
        found = model.get_submodule(name)
    except AttributeError:
        raise ValueError(f"blocks names {name!r}, but {type(model).__name__} has no module of this name") from None
    if not isinstance(found, _LISTS):
        raise ValueError(
            f"blocks names {name!r}, which is a {type(found).__name__}; expected a ModuleList or Sequential"
        )
    return [f"{name}.{child}" if name else child for child in found._modules]


def _outermost(model: nn.Module, fits: Callable[[nn.Module], bool], prefix: str = "") -> Iterator[Trunk]:
    """The names of the elements of lists that fit, and are not inside an element of another one."""
    for name, child in model.named_children():
        path = prefix + name
        if fits(child):
            yield [f"{path}.{each}" for each in child._modules]
        else:
            yield from _outermost(child, fits, f"{path}.")


def _alike(layers: nn.Module) -> bool:
    """A list of at least two elements of one class, each with parameters."""
    if not isinstance(layers, _LISTS):
        return False
    kinds = {type(layer) for layer in layers}
    return len(layers) > 1 and len(kinds) == 1 and all(any(True for _ in layer.parameters()) for layer in layers)


def _in_sequence(layers: nn.Module) -> bool:
    """Layers of any kinds, such as the features of a VGG or a MobileNet."""
    return isinstance(layers, nn.Sequential) and any(True for _ in layers.parameters())


def _in_a_row(trunk: Trunk, order: Sequence[str]) -> bool:
    if not trunk or trunk[0] not in order:
        return False
    first = order.index(trunk[0])
    return list(order[first : first + len(trunk)]) == trunk and all(order.count(name) == 1 for name in trunk)
