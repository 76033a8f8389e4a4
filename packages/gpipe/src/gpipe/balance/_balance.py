"""Balances of the costs of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from profiler import profile, profile_seconds, profile_sizes

from .._flatten._shapes import expect_data
from ..module._arguments import checked_mode
from ._cuts import Layers, balanced, checked_cuts, read_cuts
from ._peak import MODES, bytes_of, held_at_once, least_peak

Device = torch.device | int | str


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

    `sample` should have the rows of one micro-batch. It runs on the accelerator if there is one, unless `device` says
    otherwise; layers go there one at a time. On the CPU it gets the share of the intra-op threads that each partition
    will have.

    Args:
        partitions: how many, at most as many as layers.
        module: the layers; they stay as they are.
        sample: a micro-batch; tensors of shape (rows, ...), or a tree of them.
        timeout: in seconds.
        device: where it runs; by default the accelerator where there is one.
        pin: layers at which a partition has to begin: names, regular expressions for a whole name, or positions.
        forbid: layers at which none may begin.

    Returns:
        A list of how many layers each partition gets, for `GPipe`'s ``balance``.

    Raises:
        TypeError: `module` is no nn.Sequential, or `partitions` no int.
        ValueError: fewer layers than partitions, a layer that is not there, or no balance with these cuts.
    """
    cuts = checked_cuts(partitions, module, pin, forbid)
    expect_data(module, "balance_by_time")
    with intra_op_threads(max(1, torch.get_num_threads() // partitions)):
        seconds = profile_seconds(module, sample, timeout=timeout, device=device)
    return balanced(seconds, partitions, cuts)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any,  # noqa: A002
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
    schedule: str | None = None,
    checkpoint: str = "never",
    loss_fn: Callable[[Any, Any], Any] | None = None,
    target: Any = None,
    pin: Layers = (),
    forbid: Layers = (),
) -> list[int]:
    """Balances the bytes of training: what a micro-batch leaves behind, plus the parameters times `param_scale`.

    `input` is a whole mini-batch, of which a micro-batch has the `chunks`-th part. With ``device="meta"`` the bytes are
    counted without running anything.

    `param_scale` is how many times its own size a parameter takes, with gradient and state of the optimizer:

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
        partitions, module, pin, forbid: as of :func:`balance_by_time`.
        input: tensors of shape (rows, ...), or a tree of them.
        chunks: how many micro-batches the input is cut into.
        param_scale: how many times its own size a parameter takes; see above.
        device: where it runs; by default the accelerator where there is one.
        schedule: of :meth:`gpipe.GPipe.step`, by name. Stages then count as many micro-batches as they hold under it;
            else each counts one.
        checkpoint: under a `schedule`, ``"never"``, or ``"except_last"`` and ``"always"``, with which a stage keeps the
            inputs of micro-batches, and all of a single one.
        loss_fn, target: under a `schedule`, the last stage also counts what ``loss_fn(output, target)`` takes at most.

    Returns:
        As :func:`balance_by_time`.

    Raises:
        TypeError, ValueError: as :func:`balance_by_time`; also another schedule or checkpoint.
    """
    cuts = checked_cuts(partitions, module, pin, forbid)
    if schedule is None:
        return balanced(profile_sizes(module, input, chunks, param_scale, device), partitions, cuts)
    held, mode = held_at_once(schedule, chunks, partitions), MODES[checked_mode(checkpoint)]
    found = profile(module, input, chunks=chunks, device=device, loss_fn=loss_fn, target=target, timeout=1e-3)
    return least_peak(bytes_of(found, param_scale), held, mode, cuts)


def balance_by_parameters(
    partitions: int, module: nn.Sequential, *, pin: Layers = (), forbid: Layers = ()
) -> list[int]:
    """Balances the bytes of the parameters; needs no sample, and runs nothing.

    Args:
        partitions, module, pin, forbid: as of :func:`balance_by_time`.

    Returns:
        As :func:`balance_by_time`.

    Raises:
        TypeError, ValueError: as :func:`balance_by_time`.
    """
    cuts = checked_cuts(partitions, module, pin, forbid)
    sizes = [sum(parameter.numel() * parameter.itemsize for parameter in layer.parameters()) for layer in module]
    return balanced(sizes, partitions, cuts)


def balance_by_flops(
    partitions: int, module: nn.Sequential, sample: Any, *, pin: Layers = (), forbid: Layers = ()
) -> list[int]:
    """Balances the floating-point operations of forward and backward; runs nothing.

    Those of matrix products, convolutions, attention and recurrent layers are counted; other layers count as free.

    Args:
        partitions, module, pin, forbid: as of :func:`balance_by_time`.
        sample: a micro-batch; tensors of shape (rows, ...), or a tree of them. Only shapes and types are looked at.

    Returns:
        As :func:`balance_by_time`.

    Raises:
        TypeError, ValueError: as :func:`balance_by_time`.
    """
    cuts = checked_cuts(partitions, module, pin, forbid)
    return balanced(profile(module, sample, device="meta").costs("flops"), partitions, cuts)


def uniform(partitions: int, module: nn.Sequential, *, pin: Layers = (), forbid: Layers = ()) -> list[int]:
    """Balances the number of layers.

    Args:
        partitions, module, pin, forbid: as of :func:`balance_by_time`.

    Returns:
        As :func:`balance_by_time`.

    Raises:
        TypeError, ValueError: as :func:`balance_by_time`.
    """
    cuts = checked_cuts(partitions, module, pin, forbid)
    return balanced([1] * len(module), partitions, cuts)


def balance_cost(cost: Sequence[float], partitions: int, *, pin: Layers = (), forbid: Layers = ()) -> list[int]:
    """Balances costs that you know already, one for each layer; a layer is named by its position.

    Args:
        cost: of each layer, in any unit.
        partitions: how many, at most as many as layers.
        pin: positions at which a partition has to begin.
        forbid: positions at which none may begin.

    Returns:
        As :func:`balance_by_time`.

    Raises:
        TypeError: a cost that is no number.
        ValueError: a cost that is negative or not finite, fewer layers than partitions, or no balance with these cuts.

    >>> balance_cost([1, 2, 3, 4, 5, 6], 2)
    [4, 2]
    >>> balance_cost([1, 2, 3, 4, 5, 6], 2, forbid=4)
    [5, 1]
    """
    return balanced(cost, partitions, read_cuts([str(i) for i in range(len(cost))], pin, forbid))


@contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Let CPU operations use ``count`` threads, and put the number back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
