"""Find the modules that are the blocks of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, cycle, groupby

from torch import nn

_LISTS = (nn.ModuleList, nn.Sequential)
Trunk = list[str]
"""The names of blocks, one for each call, in the order in which they are called one after the other."""


def find_trunks(model: nn.Module, called: Sequence[nn.Module], blocks: str | Sequence[str] | None) -> list[Trunk]:
    """The trunks of ``model`` in the order in which they are called; ValueError if there is none.

    Args:
        called: the modules that the model calls, in order, each as often as it is called.
        blocks: the names of the lists to take, or of single modules. None takes the outermost lists whose elements are
            of one class, which must be called once each and in order; where there are none of one class, lists of any
            or modules that are called several times, whichever do most of the work.

    Raises:
        ValueError: there is no such list, or some of its elements are not called.
    """
    lists = [blocks] if isinstance(blocks, str) else list(blocks or [])
    candidates = [_elements(model, name) for name in lists]
    for name, trunk in zip(lists, candidates, strict=True):
        if not trunk or not {model.get_submodule(each) for each in trunk} <= {*called}:
            raise ValueError(f"the elements of {name!r} are not all called; leave it out of blocks")
    found = _calls(model, called, candidates or _found(model, called))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no list of blocks that are called once each and in order; name the ModuleList "
            "or Sequential that holds them, or the modules themselves, GPipe(model, sample=sample, blocks=...), or "
            "write the model as an nn.Sequential"
        )
    # Each call of a module that is named by itself is a trunk: anything may be computed between two.
    parts = [[[name] for name in trunk] if trunk[0] in lists else [trunk] for trunk in found]
    return list(chain.from_iterable(parts))


def call_numbers(model: nn.Module, trunks: Sequence[Trunk]) -> dict[nn.Module, list[int]]:
    """The calls of each block, by their numbers among those of all blocks."""
    found: dict[nn.Module, list[int]] = {}
    for j, name in enumerate(chain.from_iterable(trunks)):
        found.setdefault(model.get_submodule(name), []).append(j)
    return found


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
    """The blocks of a model for which none are named, each list or module by itself."""
    again = _called_again(model, called)
    if any(True for _ in _outermost(model, _alike)):
        return _called_once(model, called, _alike) or again
    ways = (_called_once(model, called, _in_sequence), _called_once(model, called, _unlike), again)
    return max(ways, key=lambda trunks: sum(_work(model.get_submodule(name), called) for name in chain(*trunks)))


def _work(module: nn.Module, called: Sequence[nn.Module]) -> int:
    """A measure for what the calls of a module cost: most operations multiply with parameters."""
    return called.count(module) * sum(parameter.numel() for parameter in module.parameters())


def _called_once(model: nn.Module, called: Sequence[nn.Module], fits: Callable[[nn.Module], bool]) -> list[Trunk]:
    """The outermost lists that fit and whose elements are called once each and in order."""
    candidates = [_elements(model, name) for name in _outermost(model, fits)]
    # Of a list under two names, the first one.
    names = {model.get_submodule(name): name for trunk in reversed(candidates) for name in trunk}
    order = [names[module] for module in called if module in names]
    return [trunk for trunk in candidates if _in_a_row(trunk, order)]


def _called_again(model: nn.Module, called: Sequence[nn.Module]) -> list[Trunk]:
    """The modules that are called several times, as in loops over one cell; those of a list together."""

    def place(name: str) -> str:
        parent = name.rpartition(".")[0]
        return parent if isinstance(model.get_submodule(parent), _LISTS) else name

    counts = Counter(called)
    names = _outermost(model, lambda module: counts[module] > 1 and _has_parameters(module))
    return [list(together) for _, together in groupby(names, key=place)]


def _calls(model: nn.Module, called: Sequence[nn.Module], candidates: Sequence[Trunk]) -> list[Trunk]:
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


def _outermost(model: nn.Module, fits: Callable[[nn.Module], bool], prefix: str = "") -> Iterator[str]:
    """The names of modules that fit, and are not inside another one that does."""
    for name, child in model._modules.items():
        if child is None:
            continue
        if fits(child):
            yield prefix + name
        else:
            yield from _outermost(child, fits, f"{prefix}{name}.")


def _alike(layers: nn.Module) -> bool:
    """A list of at least two elements of one class, each with parameters."""
    return _unlike(layers) and len({type(layer) for layer in layers.children()}) == 1


def _in_sequence(layers: nn.Module) -> bool:
    """Layers of any kinds, such as the features of a VGG or a MobileNet."""
    return isinstance(layers, nn.Sequential) and _has_parameters(layers)


def _unlike(layers: nn.Module) -> bool:
    """A list of at least two elements of any classes, each with parameters."""
    return isinstance(layers, _LISTS) and len(layers) > 1 and all(map(_has_parameters, layers))


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _in_a_row(trunk: Trunk, order: Sequence[str]) -> bool:
    if not trunk or trunk[0] not in order:
        return False
    first = order.index(trunk[0])
    return list(order[first : first + len(trunk)]) == trunk and all(order.count(name) == 1 for name in trunk)
