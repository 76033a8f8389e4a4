"""Find the modules that are the blocks of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain, cycle, groupby, pairwise

from torch import nn

_LISTS = (nn.ModuleList, nn.Sequential)
Fits = Callable[[nn.Module], bool]
Trunk = list[str]
"""The names of blocks that are called one after the other, one for each call."""


def find_trunks(
    model: nn.Module, called: Sequence[nn.Module], blocks: str | Sequence[str] | None
) -> Iterator[list[Trunk]]:
    """Ways to divide ``model``, each by its trunks in the order in which they are called; the first that works is best.

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
        unseen = next((name for name, _ in outermost(model, _alike)), None)
        because = f"it calls no element of {unseen!r} (layer.forward(x) in place of layer(x) is not seen)"
        raise ValueError(
            f"{type(model).__name__} cannot be divided: "
            f"{because if unseen else 'it calls no module that has parameters'}; "
            "name its blocks, or the ModuleLists or Sequentials that hold them, GPipe(model, sample=sample, "
            "blocks=[...]), or write the model as an nn.Sequential"
        )
    yield found
    if blocks is None:
        # A model may take more of one list than what its last block returns, such as hidden states that it keeps.
        longest = max(reversed(found), key=len)
        if len(found) > 1 and 2 * len(longest) >= sum(map(len, found)):
            yield [longest]
        yield _runs(model, called, [_every(model, called)])


def cut_at(trunks: Sequence[Trunk], cuts: Collection[int]) -> Iterator[Trunk]:
    """The trunks, each divided before the calls of these numbers."""
    number = 0
    for trunk in trunks:
        places = [0, *(place for place in range(1, len(trunk)) if number + place in cuts), len(trunk)]
        yield from (trunk[start:end] for start, end in pairwise(places))
        number += len(trunk)


def _elements(model: nn.Module, name: str) -> Trunk:
    """The names of the elements of a list; that of any other module itself."""
    try:
        found = model.get_submodule(name)
    except AttributeError:
        raise ValueError(f"blocks names {name!r}, but {type(model).__name__} has no module of this name") from None
    if not isinstance(found, _LISTS):
        return [name]
    return [f"{name}.{child}" if name else child for child, _ in _inside(found)]


def _inside(layers: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The elements of a list, with their names in it, and in place of a list among them, which is not called, its own.

    Such as attention and feed-forward of each layer, in lists of two.
    """
    for name, layer in layers._modules.items():
        if isinstance(layer, nn.ModuleList):
            yield from ((f"{name}.{inner}", module) for inner, module in _inside(layer))
        elif layer is not None:
            yield name, layer


def _found(model: nn.Module, called: Sequence[nn.Module]) -> list[Trunk]:
    """The blocks of a model for which none are named, each list or module by itself.

    These are the outermost lists whose elements are of one class and called, if possible those that are called once
    each and in order. If they are a small part, others or modules that are called several times, whichever do most of
    the work; all that are called, if those do less than half of it.
    """
    counts = Counter(called)

    def work(trunks: Sequence[Trunk]) -> int:  # most operations multiply with parameters
        modules = map(model.get_submodule, chain.from_iterable(trunks))
        return sum(counts[module] * _size(module) for module in modules)

    alike = _lists(model, lambda layers: _alike(layers) and any(counts[layer] for _, layer in _inside(layers)))
    again = outermost(model, lambda module: counts[module] > 1 and _has_parameters(module))
    mixed, sequences = (_in_order(model, called, _lists(model, fits)) for fits in (_in_list, _in_sequence))
    if _lists(model, _alike) and (not alike or 2 * work(alike) >= work(mixed)):
        return _in_order(model, called, alike) or alike
    best, every = max((sequences, mixed, [[name] for name, _ in again]), key=work), [_every(model, called)]
    return best if 2 * work(best) >= work(every) > 0 else every


def _every(model: nn.Module, called: Sequence[nn.Module]) -> Trunk:
    """The outermost modules that are called, or those inside of one that has more than half of all parameters.

    Modules without parameters that are called after all others, such as a loss, are no blocks.
    """
    leaves = [k for k, module in enumerate(called) if _has_parameters(module) and not [*module.children()]]
    final = called[leaves[-1] :] if leaves else called

    def inside(module: nn.Module, prefix: str = "") -> Iterator[str]:
        for name, child in module.named_children():
            is_called = child in called
            inner = [] if is_called and 2 * _size(child) <= _size(model) else [*inside(child, f"{prefix}{name}.")]
            if inner or not is_called:
                yield from inner
            elif _has_parameters(child) or child not in final:
                yield prefix + name

    return [*inside(model)]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _lists(model: nn.Module, fits: Fits) -> list[Trunk]:
    return [_elements(model, name) for name, _ in outermost(model, fits)]


def outermost(
    model: nn.Module, fits: Fits, skips: Fits = lambda module: False, prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """The modules that fit, with their names, that are not inside another one that does, or that ``skips``."""
    for name, child in model.named_children():
        if skips(child):
            continue
        if fits(child):
            yield prefix + name, child
        else:
            yield from outermost(child, fits, skips, f"{prefix}{name}.")


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
    counts = Counter(called)
    return [
        run
        for run in _runs(model, called, candidates)
        if run in candidates and all(counts[model.get_submodule(name)] == 1 for name in run)
    ]


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
