"""Find the modules that are the blocks of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, cycle, groupby

from torch import nn

_LISTS = (nn.ModuleList, nn.Sequential)
Trunk = list[str]
"""The names of blocks that are called one after the other, one for each call."""


def find_trunks(model: nn.Module, called: Sequence[nn.Module], blocks: str | Sequence[str] | None) -> list[Trunk]:
    """The trunks of ``model`` in the order in which they are called.

    Args:
        called: the modules that the model calls, in order, each as often as it is called.
        blocks: the names of the lists to take, or of single modules; None takes what :func:`_found` finds.

    Raises:
        ValueError: there are no blocks, or none of a list is called.
    """
    named = [blocks] if isinstance(blocks, str) else list(blocks or [])
    candidates = [_elements(model, name) for name in named]
    for name, candidate in zip(named, candidates, strict=True):
        if {*called}.isdisjoint(map(model.get_submodule, candidate)):
            raise ValueError(f"blocks names {name!r}, of which the model calls nothing; leave it out of blocks")
    found = _runs(model, called, candidates or _found(model, called))
    if not found:
        unseen = next(_outermost(model, _alike), None)
        because = f"it calls no element of {unseen!r} (layer.forward(x) in place of layer(x) is not seen)"
        raise ValueError(
            f"{type(model).__name__} cannot be divided: "
            f"{because if unseen else 'it has no list of modules of one class, and calls no module several times'}; "
            "name its blocks, or the ModuleLists or Sequentials that hold them, GPipe(model, sample=sample, "
            "blocks=[...]), or write the model as an nn.Sequential"
        )
    # Each call of a module that is named by itself is a trunk: anything may be computed between two.
    parts = [[[name] for name in trunk] if trunk[0] in named else [trunk] for trunk in found]
    return list(chain.from_iterable(parts))


def _elements(model: nn.Module, name: str) -> Trunk:
    """The names of the elements of a list; that of any other module itself."""
    try:
        found = model.get_submodule(name)
    except AttributeError:
        raise ValueError(f"blocks names {name!r}, but {type(model).__name__} has no module of this name") from None
    if not isinstance(found, _LISTS):
        return [name]
    return [f"{name}.{child}" if name else child for child in found._modules]


def _found(model: nn.Module, called: Sequence[nn.Module]) -> list[Trunk]:
    """The blocks of a model for which none are named, each list or module by itself.

    These are the outermost lists whose elements are of one class and called, if possible those that are called once
    each and in order. Without lists of one class, others or modules that are called several times, whichever do most
    of the work.
    """
    counts = Counter(called)
    alike = _lists(model, lambda layers: _alike(layers) and any(counts[layer] for layer in layers.children()))
    if alike or _lists(model, _alike):
        return _in_order(model, called, alike) or alike
    again = _outermost(model, lambda module: counts[module] > 1 and _has_parameters(module))
    ways = [_in_order(model, called, _lists(model, fits)) for fits in (_in_sequence, _in_list)]
    ways.append([[name] for name in again])

    def work(trunks: Sequence[Trunk]) -> int:  # most operations multiply with parameters
        modules = map(model.get_submodule, chain.from_iterable(trunks))
        return sum(counts[module] * sum(each.numel() for each in module.parameters()) for module in modules)

    return max(ways, key=work)


def _lists(model: nn.Module, fits: Callable[[nn.Module], bool]) -> list[Trunk]:
    return [_elements(model, name) for name in _outermost(model, fits)]


def _outermost(model: nn.Module, fits: Callable[[nn.Module], bool], prefix: str = "") -> Iterator[str]:
    """The names of modules that fit, and are not inside another one that does."""
    for name, child in model.named_children():
        if fits(child):
            yield prefix + name
        else:
            yield from _outermost(child, fits, f"{prefix}{name}.")


def _alike(layers: nn.Module) -> bool:
    """A list of at least two elements of one class, each with parameters."""
    return _in_list(layers) and len({type(layer) for layer in layers.children()}) == 1


def _in_sequence(layers: nn.Module) -> bool:
    """Layers of any kinds, such as the features of a VGG or a MobileNet."""
    return isinstance(layers, nn.Sequential) and _has_parameters(layers)


def _in_list(layers: nn.Module) -> bool:
    """A list of at least two elements of any classes, each with parameters."""
    return isinstance(layers, _LISTS) and len(layers) > 1 and all(map(_has_parameters, layers))


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _in_order(model: nn.Module, called: Sequence[nn.Module], candidates: Sequence[Trunk]) -> list[Trunk]:
    """Those of the ``candidates`` whose modules are called once each, in order, and none of the others between."""
    # Of a list under two names, the first one.
    names = {model.get_submodule(name): name for trunk in reversed(candidates) for name in trunk}
    order = [names[module] for module in called if module in names]
    return [trunk for trunk in candidates if _in_a_row(trunk, order)]


def _in_a_row(trunk: Trunk, order: Sequence[str]) -> bool:
    if not trunk or trunk[0] not in order:
        return False
    first = order.index(trunk[0])
    return list(order[first : first + len(trunk)]) == trunk and all(order.count(name) == 1 for name in trunk)


def _runs(model: nn.Module, called: Sequence[nn.Module], candidates: Sequence[Trunk]) -> list[Trunk]:
    """The calls of the modules in ``candidates``: a trunk for those that follow each other and are of one candidate."""
    names: dict[nn.Module, list[str]] = {}
    places: dict[nn.Module, int] = {}
    for k, candidate in enumerate(candidates):
        for name in candidate:
            module = model.get_submodule(name)
            names.setdefault(module, []).append(name)
            places.setdefault(module, k)
    turns = {module: cycle(several) for module, several in names.items()}  # the same layer may fill a list
    runs = groupby((module for module in called if module in places), key=places.__getitem__)
    return [[next(turns[module]) for module in run] for _, run in runs]
