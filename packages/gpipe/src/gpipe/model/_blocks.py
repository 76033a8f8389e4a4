"""Choose the blocks of a model, and their stages. A block is a module whose calls may split the forward.

Most blocks are elements of a list of modules, such as transformer layers. If the stages are uneven, the largest blocks
of the largest stage are replaced by the elements of lists inside them. The size of a block is its cost: the bytes of
parameters, or measured seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from torch import nn

Blocks = dict[str, nn.Module]
"""Modules by their names in the model, in the order of their stages."""

Costs = Callable[[Blocks], Sequence[float]]
"""Return the cost of each block."""

After = Mapping[nn.Module, str | None]
"""For modules outside of blocks, the block that is called last before their first use, if any."""

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_EVEN = 1.1
"""The size of the largest stage, relative to the mean, above which blocks are divided."""

_NEARLY = 0.02
"""A coarser division is chosen if its unevenness exceeds the minimum by at most this much."""


class Order(NamedTuple):
    """The order of uses in a forward.

    Attributes:
        blocks: the names of the called blocks, by first call.
        after: for modules outside of blocks, the block that was called last before their first use, if any.
    """

    blocks: list[str]
    after: After


class Division(NamedTuple):
    """The blocks of a model, and the number of blocks of each stage.

    Attributes:
        after: for modules outside of blocks, the block that is called last before their first use, as far as known.
    """

    blocks: Blocks
    balance: list[int]
    after: After


def reorder_blocks(
    order: Order, model: nn.Module, division: Division, costs: Costs | None = None, *, moves: bool
) -> Division:
    """Return a division by the order in which the model uses its modules.

    Args:
        costs: the costs of blocks; by default the bytes of parameters.
        moves: whether to reorder the blocks by their first call, and balance them again.
    """
    if not moves:
        return division._replace(after=order.after)
    names = dict.fromkeys([*order.blocks, *division.blocks])  # uncalled blocks at the end
    blocks = {name: division.blocks[name] for name in names}
    sizes = count_block_bytes(model, blocks, order.after) if costs is None else costs(blocks)
    return Division(blocks, _balance(sizes, len(division.balance)), order.after)


def divide(model: nn.Module, stages: int, names: Sequence[str] | None = None, costs: Costs | None = None) -> Division:
    """Return the blocks of ``model`` for ``stages``, balanced by their costs.

    Args:
        names: the names of modules, or of lists of modules, to use as blocks; chosen automatically by default.
        costs: the costs of blocks; the bytes of parameters by default.

    Returns:
        The blocks and their balance, for fewer stages if there are fewer blocks.

    Raises:
        ValueError: the model has no module of one of the ``names``, or no block at all.
    """
    costs = costs or partial(count_block_bytes, model)
    if names is not None:
        blocks = find_named_blocks(model, names)
        return Division(blocks, _balance(costs(blocks), min(stages, len(blocks))), {})
    divisions = [*_divisions(costs, _find_blocks(model), stages)]
    least = min(uneven for uneven, _ in divisions)
    # Prefer the coarsest of the nearly most even divisions, because a block inside a layer also costs a little.
    return next(each for uneven, each in divisions if uneven <= least + _NEARLY)


def candidates(model: nn.Module, names: Sequence[str] | None = None) -> Blocks:
    """Return all modules that :func:`divide` may choose as blocks. Some contain others."""
    if names is not None:
        return find_named_blocks(model, names)
    found = level = _find_blocks(model)
    while level:
        level = {name: each for outer, block in level.items() for name, each in _inner(outer, block).items()}
        found = {**found, **level}
    return found


def _find_blocks(model: nn.Module) -> Blocks:
    blocks = _outermost(model)
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no modules with parameters at which its forward can be cut")
    return blocks


def _divisions(costs: Costs, blocks: Blocks, stages: int) -> Iterator[tuple[float, Division]]:
    """Yield finer and finer divisions, with their :func:`unevenness`, until one is even.

    If there are too few blocks, yield one with fewer stages.
    """
    finer: Blocks | None = blocks
    while finer is not None:
        blocks, found, sizes = finer, None, costs(finer)
        if len(blocks) >= stages:
            found = Division(blocks, _balance(sizes, stages), {})
            uneven = unevenness(sizes, found.balance)
            yield uneven, found
            if uneven <= _EVEN:
                return
        finer = _divide_largest(sizes, blocks, found)
    if len(blocks) < stages:
        found = Division(blocks, [1] * len(blocks), {})
        yield unevenness(sizes, found.balance), found


def find_named_blocks(model: nn.Module, names: Sequence[str]) -> Blocks:
    """Return the modules with these ``names``, in this order. A list is replaced by its elements.

    Raises:
        TypeError: ``names`` are not strings.
        ValueError: a module does not exist or is inside another block, or there are no blocks at all.
    """
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"blocks must be a name of a module, or a list of names; got {names!r}")
    known = {name: module for name, module in model.named_modules() if name}
    found: Blocks = {}
    for name in names:
        if name not in known:
            raise ValueError(f"blocks names {name!r}, but {type(model).__name__} has no module of this name")
        found |= _elements(name, known[name]) if isinstance(known[name], _LISTS) else {name: known[name]}
    if not found:
        raise ValueError(f"blocks={names!r} names no module of {type(model).__name__} at which its forward can be cut")
    for name in found:
        if around := [other for other in found if name.startswith(f"{other}.")]:
            raise ValueError(f"blocks names {name!r} and {around[0]!r}, which contains it; name one of them")
    return found


def unevenness(costs: Sequence[float], balance: Sequence[int]) -> float:
    """Return the cost of the largest stage divided by the mean of all stages."""
    ends = [0]
    for size in balance:
        ends.append(ends[-1] + size)
    sums = [sum(costs[a:b]) for a, b in pairwise(ends)]
    return max(sums) * len(sums) / (sum(sums) or 1)


def _balance(costs: Sequence[float], stages: int) -> list[int]:
    from blockpartition import solve  # imported here, because training loops do not need it

    return [len(part) for part in solve(costs, stages)]


def _count_bytes(parameter: nn.Parameter) -> int:
    if type(parameter) is nn.Parameter:
        return parameter.numel() * parameter.element_size()
    from profiler.memory import held_bytes  # imported here, because plain models do not need it

    return held_bytes([parameter])


def count_block_bytes(model: nn.Module, blocks: Blocks, after: After = MappingProxyType({})) -> list[int]:
    """Return the bytes per block. Parameters outside blocks count for the preceding block, or for the first one."""
    costs, at, seen = [0] * len(blocks), -1, set[int]()
    numbers = {name: k for k, name in enumerate(blocks)}
    members = {module: k for k, module in enumerate(blocks.values())}
    for module in model.modules():
        if module in members:
            at = members[module]
        name = after.get(module, "")
        owner = at if name == "" else -1 if name is None else numbers[name]
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                costs[max(owner, 0)] += _count_bytes(parameter)
    return [cost + 1 for cost in costs]  # even a module without parameters takes time


def _divide_largest(costs: Sequence[float], blocks: Blocks, division: Division | None) -> Blocks | None:
    """Replace the largest divisible block of the largest stage by its parts. Return None if no block is divisible."""
    positions = range(len(blocks))
    if division is not None:
        starts = [sum(division.balance[:j]) for j in range(len(division.balance))]
        spans = [range(a, a + n) for a, n in zip(starts, division.balance, strict=True)]
        positions = max(spans, key=lambda span: sum(costs[k] for k in span))
    names = [*blocks]
    for k in sorted(positions, key=lambda k: -costs[k]):
        inner = _inner(names[k], blocks[names[k]])
        if inner:
            found: Blocks = {}
            for name, module in blocks.items():
                found |= inner if name == names[k] else {name: module}
            return found
    return None


def _inner(name: str, block: nn.Module) -> Blocks:
    """Return the parts that may replace a block; none if it is not divisible."""
    # The elements of a plain dict are usually alternatives, such as adapters. They are not called in sequence.
    choices = [f"{name}.{path}." for path, part in block.named_modules() if type(part) is nn.ModuleDict]
    found = {path: part for path, part in _outermost(block, f"{name}.").items() if not path.startswith((*choices,))}
    return found if len(found) > 1 else {}


def _outermost(module: nn.Module, prefix: str = "") -> Blocks:
    """Return the elements of the outermost lists inside ``module``, or its parts with parameters if it has no lists."""
    found: Blocks = {}
    for name, child in _inside(module, prefix):
        if child not in found.values():  # a layer may be in several places
            found[name] = child
    if not found and not prefix:
        return _parts(module)
    return found


def _inside(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, _LISTS) and _is_divisible(module):
        yield from _elements(prefix[:-1], module).items()
        return
    for name, child in module.named_children():
        yield from _inside(child, f"{prefix}{name}.")


def _elements(name: str, layers: nn.Module) -> Blocks:
    """Return the elements of a list that have parameters. A list among them is replaced by its own elements."""
    found: Blocks = {}
    for own, layer in layers.named_children():
        path = f"{name}.{own}" if name else own
        if isinstance(layer, nn.ModuleList | nn.ModuleDict):  # these are not called
            found |= _elements(path, layer)
        elif _has_parameters(layer):
            found[path] = layer
    return found


def _is_divisible(layers: nn.Module) -> bool:
    return len(_elements("", layers)) > 1


def _parts(model: nn.Module, prefix: str = "") -> Blocks:
    """Return the children with parameters. A child with more than half of all parameters is divided further."""
    children: Blocks = {}
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):  # these are not called
            children |= _elements(f"{prefix}{name}", child)
        elif _has_parameters(child):
            children[f"{prefix}{name}"] = child
    found: Blocks = {}
    for name, child in children.items():
        inner = _parts(child, f"{name}.") if 2 * _size(child) > _size(model) else {}
        found |= inner if len(inner) > 1 else {name: child}
    return found


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def map_blocks_to_stages(division: Division) -> dict[nn.Module, int]:
    """Return the stage of each block."""
    stages = [stage for stage, size in enumerate(division.balance) for _ in range(size)]
    return dict(zip(division.blocks.values(), stages, strict=True))
