"""Public entry points: validate the arguments, choose the device, then time and count every layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import streams
from microbatch import Batch, scatter

from ._arguments import (
    Device,
    check_no_gradient,
    check_number,
    check_rows,
    fewest_rows,
    first_part,
    running_device,
    sizing_device,
)
from ._count import count_layers
from ._layers import LossFunction, LossLayer, get_layers, with_loss
from ._record import Profile
from ._times import Round, measure, medians

_LEAST_ROUNDS = 3


def profile(
    module: nn.Module,
    sample: Any,
    *,
    device: Device | None = None,
    chunks: int = 1,
    rows: Sequence[int] | None = None,
    loss_fn: LossFunction | None = None,
    target: Any = None,
    split_backward: bool = False,
    timeout: float = 1.0,
    progress: bool = False,
) -> Profile:
    """Measure the time, memory and FLOPs of every layer on one micro-batch, the first of `chunks` of `sample`.

    Each layer runs in isolation, as a copy in training mode, on the detached output of the previous layer. There is one
    warm-up round, then as many timed rounds as fit in `timeout` seconds, but at least three, and a final round that
    counts bytes and FLOPs. Times are medians. `module`, `sample` and PyTorch's random generators do not change, but
    layers that use the generators of Python or NumPy advance them.

    Args:
        module: an ``nn.Sequential``, or a module that iterates over its children, such as a ``GPipe``.
        sample: a mini-batch; tensors of shape (rows, ...), or a tree of them.
        device: the CPU or an accelerator; by default the accelerator if there is one. On ``"meta"``, the default for a
            module there, nothing is computed: the profile has no seconds, and the bytes and FLOPs of a CPU.
        chunks: the number of micro-batches that `sample` is split into.
        rows: micro-batch sizes in rows, instead of `chunks`. The first rows of `sample` are measured for `timeout`
            seconds per size. The result is the profile of the largest size; :meth:`Profile.at` interpolates to others.
        loss_fn, target: also profile ``loss_fn(output, target)``; its cost is :attr:`Profile.loss`. `target` is split
            like `sample`. ``loss_fn`` may return a scalar, or a tuple that starts with one, such as a sum and its
            count, or a loss and its metrics.
        split_backward: also measure the first part of each backward separately, for the gradients of the inputs.
        timeout: how long to measure, in seconds.
        progress: show a progress indicator if stderr is a terminal.

    Returns:
        The costs of each layer, by position or name.

    Raises:
        TypeError: `module` is not an nn.Sequential, or `sample` or `target` is not a tree of tensors.
        ValueError: `module` is empty, lazy, or has gradients; this machine does not have `device`; `timeout`, `chunks`
            or `rows` is invalid.
        Exception: any error of a layer, with a note that contains the layer's name and the shapes of its input.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    >>> found = profile(model, torch.rand(8, 4), device="meta", chunks=2)
    >>> found.costs("saved_bytes"), found["0"].parameter_bytes
    ([48, 48], 60)
    """
    chain = get_layers(module)
    check_no_gradient(chain)
    check_number("timeout", timeout, positive=True)
    wanted = [None] if rows is None else check_rows(rows, chunks)
    device = sizing_device(chain, device)
    found: list[Profile] = []
    with _isolated(device):
        for number in wanted:
            batch, longer = first_part(sample, chunks, number, "sample"), chain
            if loss_fn is not None:
                part = None if target is None else first_part(target, chunks, number, "target").value
                longer = with_loss(chain, loss_fn, part)
            one = _profile_once(longer, batch, device, timeout, split_backward, progress)
            found.append(replace(one, chunks=chunks if number is None else max(1, round(fewest_rows(sample) / number))))
    return replace(found[-1], others=tuple(found[:-1]))


def _profile_once(
    chain: nn.Sequential, batch: Batch, device: torch.device, timeout: float, split: bool, progress: bool
) -> Profile:
    rounds: list[Round] = []
    if device.type != "meta":
        rounds = measure(chain, batch, device, timeout=timeout, least=_LEAST_ROUNDS, split=split, progress=progress)
    layers, loss, last = count_layers(chain, batch, device), None, chain[-1]
    if rounds:
        layers = [replace(layer, **each._asdict()) for layer, each in zip(layers, medians(rounds), strict=True)]
    if isinstance(last, LossLayer):  # its buffers are the target
        loss = replace(
            layers.pop(), kind=getattr(last.loss_fn, "__name__", type(last.loss_fn).__name__), buffer_bytes=0
        )
    return Profile(
        layers=tuple(layers),
        device=str(device),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        chunks=1,
        rows=min(batch.rows),
        rounds=len(rounds),
        loss=loss,
    )


def profile_times(module: nn.Module, sample: Any, timeout: float, device: Device | None) -> list[int]:
    """Measure the time of forward plus backward per layer, summed over the rounds that fit in `timeout` seconds.

    Only the ratios between layers are meaningful. Use `profile_seconds` for medians.

    Args:
        module, sample, timeout, device: as for :func:`profile_seconds`.

    Returns:
        The microseconds of each layer, a list of int.

    Raises:
        TypeError, ValueError: as for :func:`profile`.

    >>> microseconds = profile_times(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), torch.rand(8, 64), 0.1, "cpu")
    >>> len(microseconds), min(microseconds) > 0
    (2, True)
    """
    rounds = _rounds(module, sample, timeout, device)
    return [round(1e6 * sum(each[0] + each[1] for each in samples)) for samples in zip(*rounds, strict=True)]


def profile_seconds(
    module: nn.Module, sample: Any, *, timeout: float = 1.0, device: Device | None = None
) -> list[float]:
    """Measure only the time of forward plus backward per layer, as medians over rounds.

    A round runs a copy of every layer once. There is one warm-up round, and then at least one timed round.

    Args:
        module: as for :func:`profile`.
        sample: a micro-batch; tensors of shape (rows, ...), or a tree of them.
        timeout: how long to measure, in seconds.
        device: the CPU or an accelerator; by default the accelerator if there is one.

    Returns:
        The seconds of each layer, a list of float.

    Raises:
        TypeError, ValueError: as for :func:`profile`.

    >>> seconds = profile_seconds(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), torch.rand(8, 64), timeout=0.1)
    >>> len(seconds), min(seconds) > 0
    (2, True)
    """
    return [each[0] + each[1] for each in medians(_rounds(module, sample, timeout, device))]


def _rounds(module: nn.Module, sample: Any, timeout: float, device: Device | None) -> list[Round]:
    chain = get_layers(module)
    check_no_gradient(chain)
    check_number("timeout", timeout, positive=True)
    device = running_device(device)
    with _isolated(device):
        return measure(chain, scatter(sample, 1)[0], device, timeout=timeout)


def profile_sizes(
    module: nn.Module,
    input: Any,  # noqa: A002
    chunks: int,
    param_scale: float,
    device: Device | None,
) -> list[int]:
    """Compute the training memory of each layer: saved bytes of a micro-batch plus `param_scale` × parameter bytes.

    Saved bytes are allocated by the forward and stay alive, for the backward or as the output. Parameters and the input
    are not part of them. A parameter that several layers share counts for the first of them.

    Args:
        module: as for :func:`profile`.
        input: a mini-batch; tensors of shape (rows, ...), or a tree of them. The first micro-batch is measured.
        chunks: the number of micro-batches that `input` is split into.
        param_scale: the memory of a parameter with its gradient and optimizer state, as a multiple of its size.
        device: the CPU, an accelerator or ``"meta"``, where nothing is computed. None selects ``"meta"`` for a module
            there, else the accelerator if there is one, else the CPU.

    Returns:
        The bytes of each layer, a list of int.

    Raises:
        TypeError, ValueError: as for :func:`profile`.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    >>> profile_sizes(model, torch.rand(8, 4), chunks=2, param_scale=2.0, device="cpu")  # 4 rows of 3 floats each
    [168, 48]
    """
    chain = get_layers(module)
    check_number("param_scale", param_scale, positive=False)
    device = sizing_device(chain, device)
    with _isolated(device):
        found = count_layers(chain, scatter(input, chunks)[0], device, backward=False)
    return [int(layer.saved_bytes + param_scale * layer.parameter_bytes) for layer in found]


@contextmanager
def _isolated(device: torch.device) -> Iterator[None]:
    """Enable gradients inside this context; afterwards, restore the random generators and clear the autocast cache."""
    generators = torch.random.fork_rng([device] if streams.has_streams(device) else [])
    with generators, torch.inference_mode(False), torch.enable_grad(), streams.use_device(device):
        try:
            yield
        finally:
            torch.clear_autocast_cache()
