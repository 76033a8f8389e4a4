"""Times and counts in one record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from microbatch import Batch, scatter

from ._arguments import check_chunks, check_module, check_no_gradient, check_sample, check_timeout, sizing_device
from ._count import Count
from ._isolation import isolated
from ._progress import progress_bar
from ._record import LayerProfile, Profile
from ._sizes import count_layers
from ._storages import tensor_bytes
from ._times import Round, Seconds, measure

if TYPE_CHECKING:
    from ._arguments import Device

_LEAST_ROUNDS = 3


def profile(
    module: nn.Sequential,
    sample: Any,
    *,
    device: Device | None = None,
    chunks: int = 1,
    timeout: float = 1.0,
    progress: bool = False,
) -> Profile:
    """Seconds, bytes and FLOPs of every layer of `module` on a micro-batch: the first of `chunks` cut from `sample`.

    Each layer runs alone, as a copy in training mode, on the detached output of the layer before. After a round to
    warm up come as many rounds as fit in `timeout` seconds, but three at least, and one more in which bytes and FLOPs
    are counted; the seconds are medians. `module`, `sample` and the random generators stay as they are.

    `device` is the CPU or a CUDA device, by default CUDA where there is one. On ``"meta"`` nothing is run and no
    memory is taken: the profile has no seconds, and bytes and FLOPs as on a CPU. It is the default for a module that
    lives there. On CUDA the peak statistics of the allocator are set back.

    Only PyTorch's generators are looked after; layers that draw from Python's or numpy's move those on.

    Raises:
        TypeError: `module` is no nn.Sequential, or `sample` no tree of tensors.
        ValueError: an empty or lazy module, one with gradients, a device that is not there, no time, no micro-batch.
        What a layer raises comes out as it is, with a note that names the layer and the shapes of its input.
    """
    check_module(module)
    check_no_gradient(module)
    check_sample(sample)
    check_chunks(chunks)
    check_timeout(timeout)
    device = sizing_device(module, device)
    with isolated(device):
        batch = scatter(sample, chunks)[0]
        rounds = _rounds(module, batch, device, timeout, progress)
        counts = count_layers(module, batch, device, backward=True)
    times = _medians(rounds) if rounds else [None] * len(module)
    layers = zip(module._modules.items(), times, counts, strict=True)
    return Profile(
        layers=tuple(_record(name, layer, seconds, counted) for (name, layer), seconds, counted in layers),
        device=str(device),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        chunks=chunks,
        rows=max((len(x) for x in batch), default=0),
        rounds=len(rounds),
    )


def _rounds(module: nn.Sequential, batch: Batch, device: torch.device, timeout: float, progress: bool) -> list[Round]:
    if device.type == "meta":
        return []
    with progress_bar(progress, timeout) as spend:
        return measure(module, batch, device, timeout=timeout, least=_LEAST_ROUNDS, after_round=spend)


def _medians(rounds: list[Round]) -> list[Seconds]:
    from statistics import median  # takes as long to import as all the rest of this package

    return [
        Seconds(median(s.forward for s in samples), median(s.backward for s in samples))
        for samples in zip(*rounds, strict=True)
    ]


def _record(name: str, layer: nn.Module, seconds: Seconds | None, counted: Count) -> LayerProfile:
    parameters = list(layer.parameters())
    return LayerProfile(
        name=name,
        kind=type(layer).__name__,
        forward_seconds=seconds and seconds.forward,
        backward_seconds=seconds and seconds.backward,
        trainable_bytes=tensor_bytes([p for p in parameters if p.requires_grad]),
        frozen_bytes=tensor_bytes([p for p in parameters if not p.requires_grad]),
        buffer_bytes=tensor_bytes(list(layer.buffers())),
        latent_bytes=counted.latent,
        output_bytes=counted.output,
        peak_bytes=counted.peak,
        flops=counted.flops,
        allocated_bytes=counted.allocated,
        allocated_peak_bytes=counted.allocated_peak,
    )
