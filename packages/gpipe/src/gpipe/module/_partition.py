"""Validate a sequential module and split it into partitions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import torch
from torch import nn

from .._batchnorm import DeferredBatchNorm
from ..engine._host_memory import expect_host_memory
from ..engine._stage import StageLayers
from ._arguments import Device, check_places, to_list, whole
from ._container import expect_plain
from ._devices import expect_movable, expect_shapes, untouched_on_failure
from ._graphs import expect_no_graphs
from ._init import Initializer, expect_materializable, materialize
from ._names import Flattened
from ._tied import expect_shareable, move_all


class BalanceError(ValueError):
    """The balance does not fit the module."""


def recommend_auto_balance(message: str) -> str:
    """Append an example of how to find a balance to an error message.

    Args:
        message: the error message.

    Returns:
        The message and the example, in several lines.

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
    """Check that ``module`` can be split into stages that share no layer or parameter.

    Args:
        module: the model.
        balance: the number of layers of each partition. If given, layers of one partition may share parameters.

    Raises:
        TypeError: ``module`` is not an ``nn.Sequential``, or does more than run its layers in order.
        ValueError: a layer occurs twice, or a parameter is in two layers or, with ``balance``, in two partitions.
    """
    expect_sequential(module)
    children = list(module._modules.items())
    refuse_duplicate_layers(children)
    blocks = _blocks(children, [1] * len(children) if balance is None else balance)
    _refuse_shared_parameters(blocks, "distinct children" if balance is None else "distinct partitions")


def expect_sequential(module: object) -> None:
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"module must be nn.Sequential to be partitioned; got {type(module).__name__}; "
            "gpipe.GPipe(model, devices=...) itself, but not a subclass, accepts any model"
        )
    expect_plain(module, known=(StageLayers, Flattened))


def split_module(
    module: nn.Sequential, balance: Iterable[int], devices: Sequence[Device]
) -> tuple[nn.ModuleList, list[int], list[torch.device]]:
    """Split ``module`` into partitions and move each to its device. If this fails, no layer has been moved.

    Args:
        module: the model; its layers are moved, not copied.
        balance: the number of layers of each partition.
        devices: at least one device per partition; further ones are ignored.

    Returns:
        ``(partitions, balance, devices)``, of the same length. The layers in a partition keep their names.

    Raises:
        BalanceError: the sum of ``balance`` is not the number of layers, or an entry is not positive.
        IndexError: there are fewer devices than partitions.
        TypeError, ValueError: the same as for :func:`verify_module`; or a device cannot hold its partition.
    """
    expect_sequential(module)
    sizes = check_balance(balance, len(module))
    verify_module(module, sizes)
    places = check_places(devices, len(sizes))
    return divide(module, sizes, places), sizes, places


def divide(
    module: nn.Sequential,
    balance: Sequence[int],
    places: Sequence[torch.device],
    initializer: Initializer | None = None,
    norm_chunks: int = 0,
    *,
    offload: bool = False,
) -> nn.ModuleList:
    """Split ``module`` into partitions on their devices. Shared tensors are placed with the first partition."""
    partitions = split_layers(module, balance)
    expect_shareable(list(partitions), places)
    layers = dict(module.named_children())
    place_partitions(layers, list(partitions), places, initializer, norm_chunks, offload=offload)
    return partitions


def split_layers(module: nn.Sequential, balance: Sequence[int]) -> nn.ModuleList:
    """Split ``module`` into partitions, without moving its layers."""
    children = list(module._modules.items())
    refuse_duplicate_layers(children)
    partitions = nn.ModuleList()
    for block in _blocks(children, balance):
        partition = StageLayers()
        partition._modules.update(block)  # not add_module: a layer may have the name of an attribute
        partition.training = module.training
        partitions.append(partition)
    return partitions


def place_partitions(
    layers: Mapping[str, nn.Module],
    partitions: Sequence[nn.Module],
    places: Sequence[torch.device],
    initializer: Initializer | None,
    norm_chunks: int,
    *,
    offload: bool = False,
) -> None:
    """Check all ``partitions``, then move each to its device.

    Args:
        layers: maps names to the layers of the model.
        initializer: initializes tensors on ``meta``; None if there are none.
        norm_chunks: the ``chunks`` of deferred batch norms, which replace all batch norms; 0 to keep these.
        offload: whether parameters are moved to the host instead.
    """
    if initializer is not None:
        expect_materializable(layers, places, initializer)
    for j, (partition, place) in enumerate(zip(partitions, places, strict=True)):
        if initializer is None:
            expect_movable(partition, place, j)  # all of them, before the first one is moved
        expect_no_graphs(partition, place, j)
        if offload:
            expect_shapes(partition, j)
    if offload:
        expect_host_memory(_bytes_elsewhere(partitions), "parameters")
    every = nn.ModuleList(partitions)
    with untouched_on_failure(every):
        if initializer is not None:
            first = [torch.device("cpu")] * len(places) if offload else places
            materialize(layers, partitions, first, initializer)
        move_all(partitions, places, offload=offload)  # a shared tensor may be on the device of its last partition
        if norm_chunks:
            DeferredBatchNorm.convert_deferred_batch_norm(every, norm_chunks)


def _bytes_elsewhere(partitions: Iterable[nn.Module]) -> int:
    """Return the bytes of parameters that are not in the host's memory."""
    every = {each for partition in partitions for each in partition.parameters()}
    return sum(each.nbytes for each in every if each.device.type != "cpu")


def check_balance(balance: Iterable[int], layers: int) -> list[int]:
    """Return ``balance`` as a list of int; raise an error unless its sum is ``layers`` and all entries are positive."""
    example = f"balance={[layers // 2, layers - layers // 2]}"
    sizes = to_list("balance", balance, "a list with the number of layers of each partition", example)
    for j, size in enumerate(sizes):
        try:
            sizes[j] = whole(size)
        except TypeError:
            raise TypeError(
                f"balance[{j}] must be an int, the number of layers of partition {j}; got {size!r} (balance: {sizes})"
            ) from None
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


def _blocks(children: Iterable[Named], balance: Sequence[int]) -> list[list[Named]]:
    rest = iter(children)
    return [list(islice(rest, size)) for size in balance]


def _refuse_shared_parameters(blocks: Sequence[Sequence[Named]], where: str) -> None:
    first: dict[nn.Parameter, tuple[int, str]] = {}
    for j, block in enumerate(blocks):
        for layer, module in block:
            for name, parameter in module.named_parameters():
                k, other = first.setdefault(parameter, (j, f"'{layer}.{name}'"))
                if k != j:
                    raise ValueError(
                        f"module with duplicate parameters in {where} is not supported: '{layer}.{name}' is {other}; "
                        "put the layers that share it into one partition"
                    )


def refuse_duplicate_layers(children: Iterable[Named]) -> None:
    first: dict[int, str] = {}
    for name, layer in children:
        if id(layer) in first:
            raise ValueError(
                f"module with duplicate children is not supported: '{name}' is the same layer as '{first[id(layer)]}'; "
                "use copy.deepcopy for a second one"
            )
        first[id(layer)] = name
