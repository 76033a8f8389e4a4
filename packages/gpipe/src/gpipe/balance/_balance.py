"""Balance partitions by the costs of their layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from blockpartition import partition, place
from profiler import profile, profile_seconds, profile_sizes
from profiler.memory import held_bytes

from ..module._arguments import Device
from ..module._data import expect_data
from ..module._split_batch import replicate_constants


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: Device | None = None,
    pin: Layers = (),
    forbid: Layers = (),
) -> list[int]:
    """Balance forward plus backward time, measured on copies of the layers for about `timeout` seconds.

    Layers are measured one at a time, with the number of intra-op threads that a partition will have on the CPU.

    Args:
        partitions: the number of partitions, at most one per layer.
        module: the layers, which do not change.
        sample: a micro-batch; tensors of shape (rows, ...), or a tree of them.
        timeout: how long to measure, in seconds.
        device: the device to measure on; by default the accelerator if there is one, else the CPU.
        pin: layers that have to start a partition, by name or position.
        forbid: layers that must not start a partition.

    Returns:
        The number of layers of each partition, a list of int for `GPipe`'s ``balance``.

    Raises:
        TypeError: `module` is not an nn.Sequential, or `partitions` is not an int.
        ValueError: there are fewer layers than partitions, `pin` or `forbid` contains a layer that does not exist, or
            no balance satisfies them.
    """
    balanced = balancer(partitions, module, pin, forbid)
    expect_data(module, "balance_by_time")
    sample = replicate_constants(sample, "sample")
    # Stages run concurrently and share the threads. Measure with a stage's share, because layers scale differently.
    with intra_op_threads(max(1, torch.get_num_threads() // partitions)):
        seconds = profile_seconds(module, sample, timeout=timeout, device=device)
    return balanced(seconds)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any,  # noqa: A002
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
    pin: Layers = (),
    forbid: Layers = (),
) -> list[int]:
    """Balance training memory: the saved activations of a micro-batch plus `param_scale` times the parameters.

    Use :func:`gpipe.plan` for the memory of stages under a schedule. With ``device="meta"`` nothing runs.

    ===========================  ===========
    optimizer                    param_scale
    ===========================  ===========
    SGD                          2
    SGD(momentum=0.9)            3
    Adagrad                      3
    RMSprop                      3
    RMSprop(momentum=0.9)        4
    RMSprop(centered=True)       4
    Adadelta                     4
    Adam                         4
    AdamW                        4
    Adamax                       4
    NAdam                        4
    RAdam                        4
    Adam(amsgrad=True)           5
    ===========================  ===========

    Args:
        partitions, module, device, pin, forbid: as for :func:`balance_by_time`.
        input: a full mini-batch; tensors of shape (rows, ...), or a tree of them.
        chunks: the number of micro-batches that `input` is split into.
        param_scale: the memory of a parameter with gradient and optimizer state, as a multiple of its size.

    Returns:
        The number of layers of each partition.

    Raises:
        TypeError, ValueError: as for :func:`balance_by_time`.
    """
    balanced = balancer(partitions, module, pin, forbid)
    input = replicate_constants(input, "input")  # noqa: A001
    return balanced(profile_sizes(module, input, chunks, param_scale, device))


def balance_by_parameters(
    partitions: int, module: nn.Sequential, *, pin: Layers = (), forbid: Layers = ()
) -> list[int]:
    """Balance the bytes of the parameters, without a sample and without running the layers.

    Args:
        partitions, module, pin, forbid: as for :func:`balance_by_time`.

    Returns:
        The number of layers of each partition.

    Raises:
        TypeError, ValueError: as for :func:`balance_by_time`.
    """
    balanced = balancer(partitions, module, pin, forbid)
    sizes = [held_bytes(layer.parameters()) for layer in module]
    return balanced(sizes)


def balance_by_flops(
    partitions: int, module: nn.Sequential, sample: Any, *, pin: Layers = (), forbid: Layers = ()
) -> list[int]:
    """Balance the floating-point operations of forward and backward, with shapes only.

    Matrix products, convolutions, attention and recurrent layers are counted; other layers count as zero.

    Args:
        partitions, module, pin, forbid: as for :func:`balance_by_time`.
        sample: a micro-batch; tensors of shape (rows, ...), or a tree of them. Only shapes and dtypes are used.

    Returns:
        The number of layers of each partition.

    Raises:
        TypeError, ValueError: as for :func:`balance_by_time`.
    """
    balanced = balancer(partitions, module, pin, forbid)
    sample = replicate_constants(sample, "sample")
    return balanced(profile(module, sample, device="meta").costs("flops"))


def uniform(partitions: int, module: nn.Sequential, *, pin: Layers = (), forbid: Layers = ()) -> list[int]:
    """Balance the number of layers.

    Args:
        partitions, module, pin, forbid: as for :func:`balance_by_time`.

    Returns:
        The number of layers of each partition.

    Raises:
        TypeError, ValueError: as for :func:`balance_by_time`.
    """
    return balancer(partitions, module, pin, forbid)([1] * len(module))


def balance_cost(cost: Sequence[float], partitions: int, *, pin: Layers = (), forbid: Layers = ()) -> list[int]:
    """Balance known costs, one per layer.

    Args:
        cost: the cost of each layer, in any unit.
        partitions, pin, forbid: as for :func:`balance_by_time`; the name of a layer is its position as text.

    Returns:
        The number of layers of each partition.

    Raises:
        TypeError: a cost is not a number.
        ValueError: as for :func:`balance_by_time`, or a cost is negative or not finite.

    >>> balance_cost([1, 2, 3, 4, 5, 6], 2)
    [4, 2]
    >>> balance_cost([1, 2, 3, 4, 5, 6], 2, forbid=[4])
    [5, 1]
    """
    names = [str(i) for i in range(len(cost))]
    return _balance_cost(partitions, _positions(pin, names, "pin"), _positions(forbid, names, "forbid"), cost)


@contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Layers = Iterable[str | int]
"""Layers by name or position."""


def balancer(
    partitions: int, module: nn.Sequential, pin: Layers, forbid: Layers
) -> Callable[[Sequence[float]], list[int]]:
    """Return a function from the costs of the layers to a balance, after a check that a balance exists."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"module: expected nn.Sequential, got {type(module).__name__}; GPipe(model, devices=..., sample=...) "
            "balances a model with a custom forward"
        )
    # Take the names from _modules, because named_children() omits the second position of a layer that occurs twice.
    names = list(module._modules)
    balanced = partial(_balance_cost, partitions, _positions(pin, names, "pin"), _positions(forbid, names, "forbid"))
    balanced([1] * len(names))
    return balanced


def _balance_cost(partitions: int, pinned: Sequence[int], forbidden: Sequence[int], cost: Sequence[float]) -> list[int]:
    """Return the number of layers of each partition that minimizes the cost of the most expensive one."""
    if not pinned and not forbidden:  # partition() also breaks ties evenly
        return list(partition(cost, partitions).sizes)
    return list(place(cost, partitions, pin=pinned, forbid=forbidden).sizes)


def _positions(layers: Layers, names: Sequence[str], argument: str) -> list[int]:
    """Return the positions of ``layers``, except position 0, where a partition starts in any case."""
    if isinstance(layers, (str, int)):
        raise TypeError(f"{argument}: expected a list of layers, got {layers!r}; write [{layers!r}]")
    found = {names.index(layer) if layer in names else layer for layer in layers}
    for layer in found:
        if not isinstance(layer, int) or not 0 <= layer < len(names):
            raise ValueError(f"{argument}: {layer!r} is not a layer; the layers are {', '.join(names)}")
    return sorted(found - {0})  # type: ignore[arg-type]
