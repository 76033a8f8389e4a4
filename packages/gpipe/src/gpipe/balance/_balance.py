"""Balances by the costs of layers."""

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
from ..module._cut import replicated
from ..module._data import expect_data


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
    """Balances the seconds of forward and backward, measured on copies of the layers for about `timeout` seconds.

    Layers are measured one at a time; on the CPU with the share of the intra-op threads that each partition will have.

    Args:
        partitions: the number of partitions, at most that of layers.
        module: the layers, which do not change.
        sample: a micro-batch; tensors of shape (rows, ...), or a tree of them.
        timeout: how long to measure, in seconds.
        device: the device to measure on; by default the accelerator if there is one, else the CPU.
        pin: layers at which a partition has to begin: names or positions.
        forbid: layers at which none may begin.

    Returns:
        The number of layers of each partition, a list of int for `GPipe`'s ``balance``.

    Raises:
        TypeError: `module` is not an nn.Sequential, or `partitions` not an int.
        ValueError: there are fewer layers than partitions, `pin` or `forbid` names a layer that does not exist, or no
            balance satisfies them.
    """
    balanced = balancer(partitions, module, pin, forbid)
    expect_data(module, "balance_by_time")
    sample = replicated(sample, "sample")
    # Stages compute at the same time, each with its share of the threads: layers scale differently with them.
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
    """Balances the bytes of training: the saved activations of a micro-batch, plus the parameters times `param_scale`.

    What a stage holds under a schedule is a question for :func:`gpipe.plan`. With ``device="meta"`` nothing runs.

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
        input: a whole mini-batch; tensors of shape (rows, ...), or a tree of them.
        chunks: the number of micro-batches that `input` is cut into.
        param_scale: the memory of a parameter with gradient and optimizer state, as a multiple of its size.

    Returns:
        The number of layers of each partition.

    Raises:
        TypeError, ValueError: as :func:`balance_by_time`.
    """
    balanced = balancer(partitions, module, pin, forbid)
    input = replicated(input, "input")  # noqa: A001
    return balanced(profile_sizes(module, input, chunks, param_scale, device))


def balance_by_parameters(
    partitions: int, module: nn.Sequential, *, pin: Layers = (), forbid: Layers = ()
) -> list[int]:
    """Balances the bytes of the parameters; needs no sample, and runs nothing.

    Args:
        partitions, module, pin, forbid: as for :func:`balance_by_time`.

    Returns:
        The number of layers of each partition.

    Raises:
        TypeError, ValueError: as :func:`balance_by_time`.
    """
    balanced = balancer(partitions, module, pin, forbid)
    sizes = [held_bytes(layer.parameters()) for layer in module]
    return balanced(sizes)


def balance_by_flops(
    partitions: int, module: nn.Sequential, sample: Any, *, pin: Layers = (), forbid: Layers = ()
) -> list[int]:
    """Balances the floating-point operations of forward and backward; runs nothing.

    Matrix products, convolutions, attention and recurrent layers are counted; other layers count as zero.

    Args:
        partitions, module, pin, forbid: as for :func:`balance_by_time`.
        sample: a micro-batch; tensors of shape (rows, ...), or a tree of them. Only shapes and dtypes are used.

    Returns:
        The number of layers of each partition.

    Raises:
        TypeError, ValueError: as :func:`balance_by_time`.
    """
    balanced = balancer(partitions, module, pin, forbid)
    sample = replicated(sample, "sample")
    return balanced(profile(module, sample, device="meta").costs("flops"))


def uniform(partitions: int, module: nn.Sequential, *, pin: Layers = (), forbid: Layers = ()) -> list[int]:
    """Balances the number of layers.

    Args:
        partitions, module, pin, forbid: as for :func:`balance_by_time`.

    Returns:
        The number of layers of each partition.

    Raises:
        TypeError, ValueError: as :func:`balance_by_time`.
    """
    return balancer(partitions, module, pin, forbid)([1] * len(module))


def balance_cost(cost: Sequence[float], partitions: int, *, pin: Layers = (), forbid: Layers = ()) -> list[int]:
    """Balances costs that you know already, one for each layer; a layer is named by its position.

    Args:
        cost: the cost of each layer, in any unit.
        partitions, pin, forbid: as for :func:`balance_by_time`.

    Returns:
        The number of layers of each partition.

    Raises:
        TypeError: a cost is not a number.
        ValueError: as :func:`balance_by_time`; or a cost is negative or not finite.

    >>> balance_cost([1, 2, 3, 4, 5, 6], 2)
    [4, 2]
    >>> balance_cost([1, 2, 3, 4, 5, 6], 2, forbid=[4])
    [5, 1]
    """
    names = [str(i) for i in range(len(cost))]
    return _balanced(partitions, _positions(pin, names, "pin"), _positions(forbid, names, "forbid"), cost)


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
    """The balance of ``module`` as a function of the costs of its layers, after a check that there is one."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"module: expected nn.Sequential, got {type(module).__name__}; GPipe(model, devices=..., sample=...) "
            "balances a model with a forward of its own"
        )
    # Positions are those of children, also of one that stands in two places.
    names = list(module._modules)
    balanced = partial(_balanced, partitions, _positions(pin, names, "pin"), _positions(forbid, names, "forbid"))
    balanced([1] * len(names))
    return balanced


def _balanced(partitions: int, pinned: Sequence[int], forbidden: Sequence[int], cost: Sequence[float]) -> list[int]:
    """The layers of each partition, so that the most expensive one costs the least."""
    if not pinned and not forbidden:  # then the more even one of the optima is known too
        return list(partition(cost, partitions).sizes)
    return list(place(cost, partitions, pin=pinned, forbid=forbidden).sizes)


def _positions(layers: Layers, names: Sequence[str], argument: str) -> list[int]:
    """The positions of ``layers``, without that of the first layer, at which a partition begins anyway."""
    if isinstance(layers, (str, int)):
        raise TypeError(f"{argument}: expected a list of layers, got {layers!r}; write [{layers!r}]")
    found = {names.index(layer) if layer in names else layer for layer in layers}
    for layer in found:
        if not isinstance(layer, int) or not 0 <= layer < len(names):
            raise ValueError(f"{argument}: {layer!r} is not a layer; the layers are {', '.join(names)}")
    return sorted(found - {0})  # type: ignore[arg-type]
