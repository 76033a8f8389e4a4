"""Measure and count, and return both in one profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from microbatch import Batch, Split, flatten, rules, scatter, unflatten, unwrap

from ._arguments import (
    check_chunks,
    check_no_gradient,
    check_number,
    check_rows,
    check_sample,
    fewest_rows,
    sizing_device,
)
from ._count import Count
from ._data import LayerProfile
from ._isolation import isolated
from ._layers import layers_of, owned
from ._loss import LossFunction, LossLayer, with_loss
from ._record import Profile
from ._sizes import count_layers
from ._storages import tensor_bytes
from ._times import Seconds, measure, medians

if TYPE_CHECKING:
    from ._arguments import Device

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
    """Seconds, bytes and FLOPs of every layer of `module` on a micro-batch: the first of `chunks` cut from `sample`.

    Each layer runs alone, as a copy in training mode, on the detached output of the layer before. There is one round to
    warm up, as many rounds as fit in `timeout` seconds, but at least three, and one more in which bytes and FLOPs are
    counted. Seconds are medians. `module`, `sample` and PyTorch's random generators do not change.

    Args:
        module: an ``nn.Sequential``, or a module that iterates over its children, such as a ``GPipe``.
        sample: a mini-batch; tensors of shape (rows, ...), or a tree of them.
        device: the CPU or an accelerator; by default the accelerator if there is one. On ``"meta"`` nothing is computed
            and no memory is allocated: the profile has no seconds, and the bytes and FLOPs of a CPU. It is the default
            for a module on ``meta``.
        chunks: the number of micro-batches that `sample` is cut into.
        rows: instead of `chunks`: numbers of rows, for each of which the first rows of `sample` are measured for
            `timeout` seconds. The result is that of the largest number; :meth:`Profile.at` returns it for any.
        loss_fn, target: also profile ``loss_fn(output, target)``; its cost is :attr:`Profile.loss`. `target` is cut
            like `sample`. A ``loss_fn`` may return a scalar, or ``(sum, count)``.
        split_backward: also measure the first part of each backward alone, for the gradients of the inputs.
        timeout: how long to measure, in seconds.
        progress: show a progress bar, if the output is a terminal.

    Layers that draw from the generators of Python or NumPy change these.

    Returns:
        The figures of each layer, by its name.

    Raises:
        TypeError: `module` is not an nn.Sequential, or `sample` not a tree of tensors.
        ValueError: `module` is empty, lazy, or has gradients; this machine does not have `device`; `timeout`, `chunks`
            or `rows` is invalid.
        Exception: any error of a layer, with a note that names the layer and the shapes of its input.
    """
    chain = layers_of(module)
    check_no_gradient(chain)
    check_sample(sample)
    check_number("timeout", timeout, positive=True)
    device = sizing_device(chain, device)
    wanted = [None] if rows is None else check_rows(rows)
    check_chunks(chunks)
    if rows is not None and chunks != 1:
        raise ValueError(f"rows: expected either rows or chunks, got rows={list(rows)} and chunks={chunks}")
    found: list[Profile] = []
    with isolated(device):
        for number in wanted:
            batch, of = _cut(sample, chunks, number), None if target is None else _cut(target, chunks, number).value
            longer = chain if loss_fn is None else with_loss(chain, loss_fn, of)
            one = _profile_once(longer, batch, device, timeout, split_backward, progress)
            found.append(replace(one, chunks=chunks if number is None else max(1, round(fewest_rows(sample) / number))))
    return replace(found[-1], others=tuple(found[:-1]))


def _cut(value: Any, chunks: int, rows: int | None) -> Batch:
    """The first micro-batch of ``value``."""
    if rows is None:
        return scatter(value, chunks)[0]
    fewest = fewest_rows(value)
    if rows > fewest:
        raise ValueError(f"rows: expected numbers of at most {fewest}, the rows of the sample, got {rows}")
    bare, spec = unwrap(value)
    leaves, tree = flatten(bare)
    for k, (leaf, rule) in enumerate(zip(leaves, rules(bare, spec), strict=True)):
        if isinstance(rule, Split) and isinstance(leaf, Tensor):
            leaves[k] = leaf.narrow(rule.dim, 0, rows)
    return Batch(unflatten(leaves, tree))


def _profile_once(
    chain: nn.Sequential, batch: Batch, device: torch.device, timeout: float, split: bool, progress: bool
) -> Profile:
    rounds = []
    if device.type != "meta":
        rounds = measure(chain, batch, device, timeout=timeout, least=_LEAST_ROUNDS, split=split, progress=progress)
    times = medians(rounds) if rounds else [None] * len(chain)
    counts = count_layers(chain, batch, device)
    figures = zip(chain._modules.items(), owned(chain), times, counts, strict=True)
    layers = [_record(name, layer, *own, seconds, counted) for (name, layer), own, seconds, counted in figures]
    loss = layers.pop() if isinstance(chain[-1], LossLayer) else None
    return Profile(
        layers=tuple(layers),
        device=str(device),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        chunks=1,
        rows=max((len(x) for x in batch), default=0),
        rounds=len(rounds),
        loss=loss,
    )


def _record(
    name: str,
    layer: Any,
    parameters: Sequence[Tensor],
    buffers: Sequence[Tensor],
    seconds: Seconds | None,
    counted: Count,
) -> LayerProfile:
    is_loss = isinstance(layer, LossLayer)
    if is_loss:  # its buffers are the target
        layer, buffers = layer.loss_fn, []
    trainable = [tensor_bytes(p) for p in parameters if p.requires_grad]
    return LayerProfile(
        name=name,
        kind=getattr(layer, "__name__", type(layer).__name__),
        forward_seconds=seconds and seconds.forward,
        backward_seconds=seconds and seconds.backward,
        backward_input_seconds=seconds and seconds.backward_input,
        trainable_bytes=sum(trainable),
        frozen_bytes=tensor_bytes(parameters) - sum(trainable),
        buffer_bytes=tensor_bytes(buffers),
        largest_parameter_bytes=max(trainable, default=0),
        **counted.figures,
    )
