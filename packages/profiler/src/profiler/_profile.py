"""Times and counts in one record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from microbatch import Batch, map_tensors, scatter

from ._arguments import check_chunks, check_no_gradient, check_rows, check_sample, check_timeout, sizing_device
from ._count import Count
from ._data import LayerProfile
from ._isolation import isolated
from ._layers import layers_of
from ._loss import LossFunction, LossLayer, with_loss
from ._owned import Owned, owned
from ._progress import progress_bar
from ._record import Profile
from ._sizes import count_layers
from ._storages import tensor_bytes
from ._times import Round, Seconds, measure, medians

if TYPE_CHECKING:
    from ._arguments import Device

_LEAST_ROUNDS = 3


def profile(
    module: nn.Module,
    sample: Any,
    *,
    layers: Sequence[str] | None = None,
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

    Each layer runs alone, as a copy in training mode, on the detached output of the layer before. After a round to
    warm up come as many rounds as fit in `timeout` seconds, but three at least, and one more in which bytes and FLOPs
    are counted; the seconds are medians. `module`, `sample` and the random generators stay as they are.

    Args:
        module: an ``nn.Sequential``, or a module that iterates over its children, such as a ``GPipe``.
        sample: a mini-batch; tensors of shape (rows, ...), or a tree of them.
        layers: names of submodules of `module`, which then may be anything: those that run one after the other.
        device: the CPU or an accelerator, which is the default where there is one. On ``"meta"`` nothing is run and no
            memory is taken: the profile has no seconds, and bytes and FLOPs as on a CPU. It is the default for a module
            that lives there. On an accelerator the peak statistics of the allocator are set back.
        chunks: how many micro-batches `sample` is cut into.
        rows: instead of `chunks`: numbers of rows to measure at, the first of `sample`, each for `timeout` seconds. The
            result is that of the most rows, and :meth:`Profile.at` gives it for any.
        loss_fn, target: also profile ``loss_fn(output, target)``, which goes to :attr:`Profile.loss`; `target` is cut
            as `sample` is. Of ``(sum, count)`` the sum is meant.
        split_backward: also measure the part of each backward that the layer before waits for.
        timeout: in seconds.
        progress: show a progress bar, on a terminal.

    Only PyTorch's generators are looked after; layers that draw from Python's or numpy's move those on.

    Returns:
        The figures of each layer, under its name.

    Raises:
        TypeError: `module` is no nn.Sequential, or `sample` no tree of tensors.
        ValueError: an empty or lazy module, one with gradients, a device that is not there, no time, no micro-batch.
        What a layer raises comes out as it is, with a note that names the layer and the shapes of its input.
    """
    chain = layers_of(module, layers)
    check_no_gradient(chain)
    check_sample(sample)
    check_timeout(timeout)
    device = sizing_device(chain, device)
    wanted = [None] if rows is None else check_rows(rows)
    check_chunks(chunks)
    if rows is not None and chunks != 1:
        raise ValueError(f"rows: expected either rows or chunks, got rows={list(rows)} and chunks={chunks}")
    found: list[Profile] = []
    with isolated(device):
        for number in wanted:
            batch, of = _cut(sample, chunks, number), _cut(target, chunks, number).value if target is not None else None
            longer = chain if loss_fn is None else with_loss(chain, loss_fn, of)
            one = _profile_once(longer, batch, device, timeout, split_backward, progress)
            found.append(replace(one, chunks=_chunks(sample, chunks, number)))
    return replace(found[-1], others=tuple(found[:-1]))


def _cut(value: Any, chunks: int, rows: int | None) -> Batch:
    """The first micro-batch of ``value``."""
    if rows is None:
        return scatter(value, chunks)[0]
    fewest = min(len(tensor) for tensor in Batch(value))
    if rows > fewest:
        raise ValueError(f"rows: expected numbers of at most {fewest}, the rows of the sample, got {rows}")
    return Batch(map_tensors(lambda tensor: tensor[:rows], value))


def _chunks(sample: Any, chunks: int, rows: int | None) -> int:
    return chunks if rows is None else max(1, round(min(len(tensor) for tensor in Batch(sample)) / rows))


def _profile_once(
    chain: nn.Sequential, batch: Batch, device: torch.device, timeout: float, split: bool, progress: bool
) -> Profile:
    rounds = _rounds(chain, batch, device, timeout, split, progress)
    counts, skips = count_layers(chain, batch, device, split=split)
    times = medians(rounds) if rounds else [None] * len(chain)
    records = [
        _record(name, layer, own, seconds, counted)
        for (name, layer), own, seconds, counted in zip(
            chain._modules.items(), owned(chain), times, counts, strict=True
        )
    ]
    loss = records.pop() if isinstance(chain[-1], LossLayer) else None
    return Profile(
        layers=tuple(records),
        device=str(device),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        chunks=1,
        rows=max((len(x) for x in batch), default=0),
        rounds=len(rounds),
        loss=loss,
        skips=tuple(skips),
    )


def _rounds(
    module: nn.Sequential, batch: Batch, device: torch.device, timeout: float, split: bool, progress: bool
) -> list[Round]:
    if device.type == "meta":
        return []
    with progress_bar(progress, timeout) as spend:
        return measure(module, batch, device, timeout=timeout, least=_LEAST_ROUNDS, split=split, after_round=spend)


def _record(name: str, layer: nn.Module, own: Owned, seconds: Seconds | None, counted: Count) -> LayerProfile:
    inner = layer.loss_fn if isinstance(layer, LossLayer) else layer
    targets = layer.target_bytes if isinstance(layer, LossLayer) else 0
    trainable = [p for p in own.parameters if p.requires_grad]
    return LayerProfile(
        name=name,
        kind=getattr(inner, "__name__", type(inner).__name__),
        forward_seconds=seconds and seconds.forward,
        backward_seconds=seconds and seconds.backward,
        trainable_bytes=tensor_bytes(trainable),
        frozen_bytes=tensor_bytes([p for p in own.parameters if not p.requires_grad]),
        buffer_bytes=tensor_bytes(own.buffers) - targets,
        saved_bytes=counted.saved,
        output_bytes=counted.output,
        peak_bytes=counted.peak,
        flops=counted.flops,
        allocated_bytes=counted.allocated,
        allocated_peak_bytes=counted.allocated_peak,
        backward_input_seconds=seconds.backward_input if seconds and counted.parting else None,
        passing_bytes=sum(each.size for each in counted.loose),
        freed_bytes=counted.freed,
        backward_peak_bytes=counted.backward_peak,
        adding_peak_bytes=counted.adding_peak,
        given_peak_bytes=counted.given_peak,
        adding_given_peak_bytes=counted.adding_given_peak,
        parting_bytes=counted.parting and counted.parting.left,
        parting_peak_bytes=counted.parting and counted.parting.peak,
        largest_parameter_bytes=max(map(tensor_bytes, trainable), default=0),
    )
