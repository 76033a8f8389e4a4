"""Check a sequential module, and cut it into partitions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, islice
from typing import Any

import torch
from torch import nn

from .._current import current
from .._flatten._names import Flattened
from ..values._leaves import Arguments
from ._arguments import Device, checked_sizes, parsed_device
from ._container import expect_plain
from ._devices import expect_movable, untouched_on_failure
from ._graphs import expect_no_graphs
from ._init import Means, expect_materializable, materialize
from ._tied import expect_shareable, move_all


class StageLayers(nn.Sequential):
    """The layers of one stage under their own names. The first layer may take several arguments."""

    tells_layers = True
    """It tells :data:`current` which layer is computed."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # A compiled partition is one layer: its code would be compiled again for each cell.
        # Another pipe inside of a layer has partitions too: the numbers are those of the cell's own.
        rng = None if torch.compiler.is_compiling() else current.rng
        if rng is None or rng.module is not self:
            first, *others = self._modules.values()
            value = first(*args, **kwargs)
            for layer in others:
                value = layer(value)
            return value
        if not current.blocks:
            for k, layer in enumerate(self._modules.values()):
                rng.at = k
                value = layer(value) if k else layer(*args, **kwargs)
            rng.at = -1
            return value
        at, value = 0, args[0] if len(args) == 1 and not kwargs else Arguments(args, kwargs)
        for block in current.blocks:
            value = self._computed(range(at, block.numbers.start), value)
            value = block.compute(partial(self._computed, block.numbers), value)
            at = block.numbers.stop
        return self._computed(range(at, len(self._modules)), value)

    def _computed(self, numbers: range, value: Any) -> Any:
        """The output of the layers of these numbers for ``value``."""
        rng = current.rng
        assert rng is not None
        for k, layer in islice(enumerate(self._modules.values()), numbers.start, numbers.stop):
            rng.at = k
            is_call = not k and isinstance(value, Arguments)
            value = layer(*value.args, **value.kwargs) if is_call else layer(value)
        rng.at = -1
        return value


class BalanceError(ValueError):
    """The balance does not fit the module."""


def recommend_auto_balance(message: str) -> str:
    """``message``, with an example of how to find a balance.

    Args:
        message: the error.

    Returns:
        A text of several lines.

    >>> print(recommend_auto_balance("no balance"))
    no balance
    <BLANKLINE>
    A balance says how many layers each partition gets. To find a good one:
    <BLANKLINE>
        from gpipe import GPipe
        from gpipe.balance import balance_by_time
    <BLANKLINE>
        partitions = torch.cuda.device_count()
        sample = torch.rand(...)  # a mini-batch of your data
        balance = balance_by_time(partitions, model, sample)
        model = GPipe(model, balance, chunks=8)
    <BLANKLINE>
    """
    return f"""{message}

A balance says how many layers each partition gets. To find a good one:

    from gpipe import GPipe
    from gpipe.balance import balance_by_time

    partitions = torch.cuda.device_count()
    sample = torch.rand(...)  # a mini-batch of your data
    balance = balance_by_time(partitions, model, sample)
    model = GPipe(model, balance, chunks=8)
"""


def verify_module(module: nn.Sequential, balance: Sequence[int] | None = None) -> None:
    """Raise unless ``module`` can be cut into stages that share nothing.

    Args:
        module: the model.
        balance: the number of layers of each partition. If given, layers of one partition may share parameters.

    Raises:
        TypeError: ``module`` is not an ``nn.Sequential``, or does more than compute its layers.
        ValueError: a layer occurs twice, or a parameter in two layers or, given a balance, in two partitions.
    """
    expect_sequential(module)
    children = list(module._modules.items())
    refuse_duplicate_layers(children)
    blocks = [[each] for each in children] if balance is None else list(_blocks(children, balance))
    _refuse_shared_parameters(blocks, "distinct children" if balance is None else "distinct partitions")


def expect_sequential(module: object) -> None:
    """Raise TypeError unless ``module`` is an ``nn.Sequential`` that only computes its layers in order."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"module must be nn.Sequential to be partitioned; got {type(module).__name__}; of any other model, "
            "GPipe(model, sample=...) makes one, where sample is an input of the model, such as two rows of a batch"
        )
    expect_plain(module, known=(StageLayers, Flattened))


def split_module(
    module: nn.Sequential, balance: Iterable[int], devices: Sequence[Device]
) -> tuple[nn.ModuleList, list[int], list[torch.device]]:
    """Cut ``module`` into partitions and move each to its device.

    Args:
        module: the model; its layers are moved, not copied.
        balance: the number of layers of each partition.
        devices: at least one for each partition; further ones are ignored.

    Returns:
        ``(partitions, balance, devices)``, of the same length. The layers in a partition keep their names.

    Raises:
        BalanceError: ``balance`` does not fit the number of layers, or is not made of positive integers.
        IndexError: there are fewer devices than partitions.
        TypeError, ValueError: as for :func:`verify_module`; or a device cannot hold its partition.

    On any error no layer has moved.
    """
    expect_sequential(module)
    balance = checked_balance(balance, len(module))
    verify_module(module, balance)
    return divide(module, balance, devices, None)


def divide(
    module: nn.Sequential, balance: Iterable[int], devices: Sequence[Device], means: Means | None
) -> tuple[nn.ModuleList, list[int], list[torch.device]]:
    """Like :func:`split_module`, but partitions may share parameters; these are on the device of the first that has
    them.

    Args:
        means: if given, initialises layers on ``meta`` on their devices.
    """
    expect_sequential(module)
    balance = checked_balance(balance, len(module))
    partitions = partitions_of(module, balance)
    if len(balance) > len(devices):
        raise IndexError(
            f"too few devices to hold given partitions (devices: {len(devices)}, partitions: {len(balance)}); a device "
            "may be given several times"
        )
    places = [parsed_device(device, f"devices[{j}]") for j, device in enumerate(devices[: len(balance)])]
    expect_shareable(list(partitions), places)
    place_partitions(module, partitions, places, means)
    return partitions, balance, places


def partitions_of(module: nn.Sequential, balance: Sequence[int]) -> nn.ModuleList:
    """The partitions of ``module``. Its layers are not moved.

    Raises:
        ValueError: a layer occurs twice.
    """
    refuse_duplicate_layers(list(module._modules.items()))
    blocks = _blocks(list(module._modules.items()), balance)
    return nn.ModuleList(partition_of(block, module.training) for block in blocks)


def partition_of(layers: Iterable[Named], training: bool) -> StageLayers:
    """A partition of these layers, with their names."""
    partition = StageLayers()
    partition._modules.update(layers)
    partition.training = training
    return partition


def place_partitions(
    module: nn.Sequential, partitions: nn.ModuleList, places: Sequence[torch.device], means: Means | None
) -> None:
    """Move each of the ``partitions`` of ``module`` to its place, after all were checked.

    Args:
        means: if given, gives values to what is on ``meta``, on its place.

    Raises:
        ValueError: a place cannot hold its partition, or ``means`` does not fit the module. Then none has moved.
    """
    if means is not None:
        expect_materializable(dict(module.named_children()), places, means)
    for j, (partition, place) in enumerate(zip(partitions, places, strict=True)):
        if means is None:
            expect_movable(partition, place, j)  # all of them before the first moves
        expect_no_graphs(partition, place, j)
    with untouched_on_failure(partitions):
        if means is not None:
            materialize(partitions, places, means)
        move_all(list(partitions), places)  # a shared tensor may be on the device where it was needed last


def checked_balance(balance: Iterable[int], layers: int) -> list[int]:
    """``balance`` as a list; :class:`BalanceError` unless it assigns each of the ``layers`` to one partition."""
    sizes = checked_sizes(balance, layers)
    if sum(sizes) != layers:
        raise BalanceError(
            recommend_auto_balance(
                f"module and sum of balance have different length (module: {layers}, sum of balance: {sum(sizes)}, "
                f"balance: {sizes})"
            )
        )
    if any(size <= 0 for size in sizes):
        raise BalanceError(recommend_auto_balance(f"all balance numbers must be positive integer (balance: {sizes})"))
    return sizes


Named = tuple[str, nn.Module]


def _blocks(children: Sequence[Named], balance: Sequence[int]) -> Iterator[Sequence[Named]]:
    ends = list(accumulate(balance))
    for size, end in zip(balance, ends, strict=True):
        yield children[end - size : end]


def _refuse_shared_parameters(blocks: Sequence[Sequence[Named]], where: str) -> None:
    seen: dict[int, str] = {}
    for block in blocks:
        own = _parameters(block)
        for key in seen.keys() & own.keys():
            raise ValueError(
                f"module with duplicate parameters in {where} is not supported: {own[key]} is {seen[key]}; "
                "put the layers that share it into one partition"
            )
        seen |= own


def _parameters(block: Sequence[Named]) -> dict[int, str]:
    """The name of each parameter in ``block``, by identity."""
    return {id(p): f"'{layer}.{name}'" for layer, module in block for name, p in module.named_parameters()}


def refuse_duplicate_layers(children: Iterable[Named]) -> None:
    """Raise ValueError if a layer has two places among ``children``."""
    first: dict[int, str] = {}
    for name, layer in children:
        if id(layer) in first:
            raise ValueError(
                f"module with duplicate children is not supported: '{name}' is the same layer as '{first[id(layer)]}'; "
                "use copy.deepcopy for a second one"
            )
        first[id(layer)] = name
