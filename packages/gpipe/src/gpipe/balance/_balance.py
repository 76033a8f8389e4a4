"""Balances of the costs of layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from blockpartition import Infeasible, Mode, Stage, partition, place
from profiler import profile, profile_seconds, profile_sizes

from .._flatten._shapes import expect_data
from ..module._arguments import checked_mode
from ..schedule import in_flight, named

Device = torch.device | int | str
Layer = str | re.Pattern[str] | int
Layers = Layer | Iterable[Layer]


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
    cuts = _checked(partitions, module, pin, forbid)
    expect_data(module, "balance_by_time")
    with _threads(max(1, torch.get_num_threads() // partitions)):
        seconds = profile_seconds(module, sample, timeout=timeout, device=device)
    return _balance(seconds, partitions, cuts)


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
        partitions: how many, at most as many as layers.
        module: the layers; they stay as they are.
        input: tensors of shape (rows, ...), or a tree of them.
        chunks: how many micro-batches the input is cut into.
        param_scale: how many times its own size a parameter takes; see above.
        device: where it runs; by default the accelerator where there is one.
        schedule: of :meth:`gpipe.GPipe.step`, by name. Stages then count as many micro-batches as they hold under it;
            else each counts one.
        checkpoint: under a `schedule`, ``"never"``, or ``"except_last"`` and ``"always"``, with which a stage keeps the
            inputs of micro-batches, and all of a single one.
        loss_fn, target: under a `schedule`, the last stage also counts what ``loss_fn(output, target)`` takes at most.
        pin: layers at which a partition has to begin: names, regular expressions for a whole name, or positions.
        forbid: layers at which none may begin.

    Returns:
        A list of how many layers each partition gets, for `GPipe`'s ``balance``.

    Raises:
        TypeError: `module` is no nn.Sequential, or `partitions` no int.
        ValueError: fewer layers than partitions, a layer that is not there, no balance with these cuts, or another
            schedule or checkpoint.
    """
    cuts = _checked(partitions, module, pin, forbid)
    if schedule is None:
        return _balance(profile_sizes(module, input, chunks, param_scale, device), partitions, cuts)
    held = _held(schedule, chunks, partitions)
    mode = _MODES[checked_mode(checkpoint)]
    found = profile(module, input, chunks=chunks, device=device, loss_fn=loss_fn, target=target, timeout=1e-3)
    boundary = [0, *(layer.output_bytes for layer in found.layers[:-1])]  # the caller has the input anyhow
    memory = [round(param_scale * layer.parameter_bytes) for layer in found]
    memory[-1] += found.loss.peak_bytes if found.loss else 0
    return _least_peak(memory, found.costs("saved_bytes"), boundary, held, mode, cuts)


def balance_by_parameters(
    partitions: int, module: nn.Sequential, *, pin: Layers = (), forbid: Layers = ()
) -> list[int]:
    """Balances the bytes of the parameters; needs no sample, and runs nothing.

    Args:
        partitions: how many, at most as many as layers.
        module: the layers.
        pin: layers at which a partition has to begin: names, regular expressions for a whole name, or positions.
        forbid: layers at which none may begin.

    Returns:
        A list of how many layers each partition gets, for `GPipe`'s ``balance``.

    Raises:
        TypeError: `module` is no nn.Sequential, or `partitions` no int.
        ValueError: fewer layers than partitions, a layer that is not there, or no balance with these cuts.
    """
    cuts = _checked(partitions, module, pin, forbid)
    sizes = [sum(parameter.numel() * parameter.itemsize for parameter in layer.parameters()) for layer in module]
    return _balance(sizes, partitions, cuts)


def balance_by_flops(
    partitions: int, module: nn.Sequential, sample: Any, *, pin: Layers = (), forbid: Layers = ()
) -> list[int]:
    """Balances the floating-point operations of forward and backward; runs nothing.

    PyTorch counts those of matrix products, convolutions and attention; other layers count as free.

    Args:
        partitions: how many, at most as many as layers.
        module: the layers.
        sample: a micro-batch; tensors of shape (rows, ...), or a tree of them. Only shapes and types are looked at.
        pin: layers at which a partition has to begin: names, regular expressions for a whole name, or positions.
        forbid: layers at which none may begin.

    Returns:
        A list of how many layers each partition gets, for `GPipe`'s ``balance``.

    Raises:
        TypeError: `module` is no nn.Sequential, or `partitions` no int.
        ValueError: fewer layers than partitions, a layer that is not there, or no balance with these cuts.
    """
    cuts = _checked(partitions, module, pin, forbid)
    return _balance(profile(module, sample, device="meta").costs("flops"), partitions, cuts)


def uniform(partitions: int, module: nn.Sequential, *, pin: Layers = (), forbid: Layers = ()) -> list[int]:
    """Balances the number of layers.

    Args:
        partitions: how many, at most as many as layers.
        module: the layers.
        pin: layers at which a partition has to begin: names, regular expressions for a whole name, or positions.
        forbid: layers at which none may begin.

    Returns:
        A list of how many layers each partition gets, for `GPipe`'s ``balance``.

    Raises:
        TypeError: `module` is no nn.Sequential, or `partitions` no int.
        ValueError: fewer layers than partitions, a layer that is not there, or no balance with these cuts.
    """
    cuts = _checked(partitions, module, pin, forbid)
    return _balance([1] * len(module), partitions, cuts)


def balance_cost(cost: Sequence[float], partitions: int, *, pin: Layers = (), forbid: Layers = ()) -> list[int]:
    """Balances costs that you know already, one for each layer; a layer is named by its position.

    Args:
        cost: of each layer, in any unit.
        partitions: how many, at most as many as layers.
        pin: positions at which a partition has to begin.
        forbid: positions at which none may begin.

    Returns:
        A list of how many layers each partition gets, for `GPipe`'s ``balance``.

    Raises:
        TypeError: a cost that is no number.
        ValueError: a cost that is negative or not finite, fewer layers than partitions, or no balance with these cuts.

    >>> balance_cost([1, 2, 3, 4, 5, 6], 2)
    [4, 2]
    >>> balance_cost([1, 2, 3, 4, 5, 6], 2, forbid=4)
    [5, 1]
    """
    return _balance(cost, partitions, _read([str(i) for i in range(len(cost))], pin, forbid))


# What a stage keeps of the micro-batches that it holds; where it recomputes, all of one at a time.
_KEEPS = Mode("keep", boundary=0)
_RECOMPUTES = Mode("recompute", saved=0, transient=1)
_MODES = {"never": _KEEPS, "except_last": _RECOMPUTES, "always": _RECOMPUTES}


def _held(schedule: str, chunks: int, partitions: int) -> list[int]:
    """How many micro-batches each stage holds at once."""
    return [in_flight(program) for program in named(schedule, chunks, tuple(range(partitions)))]


def _least_peak(
    memory: Sequence[float],
    activations: Sequence[float],
    boundary: Sequence[float],
    held: Sequence[int],
    mode: Mode,
    cuts: _Cuts,
) -> list[int]:
    """The balance whose fullest stage takes the fewest bytes: the least capacity for which there is a placement."""

    def placed(capacity: int) -> list[int] | None:
        stages = [Stage(capacity=capacity, modes=[mode])] * len(held)
        try:
            found = place(
                [0] * len(memory), stages, memory=memory, activations=activations, boundary=boundary,
                in_flight=held, pin=cuts.pin, forbid=cuts.forbid,
            )  # fmt: skip
        except Infeasible:
            return None
        return list(found.sizes)

    least, enough = 0, round(sum(memory) + (max(held) + 1) * (sum(activations) + sum(boundary)))
    while least < enough:
        middle = (least + enough) // 2
        if placed(middle) is None:
            least = middle + 1
        else:
            enough = middle
    sizes = placed(least)
    assert sizes is not None
    return sizes


class _Cuts(NamedTuple):
    """Positions at which a partition has to begin, or must not."""

    pin: list[int]
    forbid: list[int]


def _balance(cost: Sequence[float], partitions: int, cuts: _Cuts) -> list[int]:
    if not any(cuts):
        return list(partition(cost, partitions).sizes)
    return list(place(cost, partitions, pin=cuts.pin, forbid=cuts.forbid).sizes)


def _checked(partitions: int, module: nn.Sequential, pin: Layers, forbid: Layers) -> _Cuts:
    """The cuts, if there is any balance with them: nobody should wait for a measurement to learn of a mistake."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"module: expected nn.Sequential, got {type(module).__name__}; wrap the layers in one")
    cuts = _read(list(module._modules), pin, forbid)
    _balance([1] * len(module), partitions, cuts)
    return cuts


def _read(names: list[str], pin: Layers, forbid: Layers) -> _Cuts:
    return _Cuts(_cuts(pin, names, "pin"), _cuts(forbid, names, "forbid"))


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _cuts(layers: Layers, names: list[str], argument: str) -> list[int]:
    """The positions that are meant; the first layer begins a partition anyhow."""
    wanted = [layers] if isinstance(layers, (str, re.Pattern, int)) else layers
    return sorted({position for layer in wanted for position in _positions(layer, names, argument)} - {0})


def _positions(layer: Layer, names: list[str], argument: str) -> list[int]:
    positions = [i for i, name in enumerate(names) if _is_meant(layer, i, name)]
    if not positions:
        raise ValueError(f"{argument}: {layer!r} is no layer; there are {', '.join(names)}")
    return positions


def _is_meant(layer: Layer, position: int, name: str) -> bool:
    if isinstance(layer, int):
        return layer == position
    return layer == name or re.fullmatch(layer, name) is not None
