"""Counts the bytes of each layer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from microbatch import Batch, scatter

from ._alike import situation
from ._arguments import check_chunks, check_number, check_sample, sizing_device
from ._count import Count, count
from ._enter import copied, enter_batch
from ._fake import FusedAttention, explained, fake_batch, fake_layers, fake_mode, materialised, zeros_like
from ._isolation import isolated
from ._layers import layers_of, owned
from ._sandbox import layerwise_sandbox
from ._storages import tensor_bytes
from ._walk import Visit, walk

if TYPE_CHECKING:
    from ._arguments import Device


def profile_sizes(
    module: nn.Module,
    input: Any,  # noqa: A002
    chunks: int,
    param_scale: float,
    device: Device | None,
) -> list[int]:
    """Bytes of each layer in training: saved bytes of a micro-batch plus parameter bytes × `param_scale`.

    Saved bytes are those that the forward allocates and that stay alive, for the backward or as the output. Parameters
    and the input do not count; a tensor that several layers share counts for the first. They are measured on the first
    micro-batch, which has the most rows.

    On the device ``"meta"`` nothing is computed and no memory is allocated: models of any size take seconds.

    Args:
        module: as for :func:`profile`.
        input: a mini-batch; tensors of shape (rows, ...), or a tree of them.
        chunks: the number of micro-batches that `input` is cut into.
        param_scale: the memory of a parameter with its gradient and optimizer state, as a multiple of its size.
        device: the CPU, an accelerator or ``"meta"``; None for the accelerator if there is one, else the CPU.

    Returns:
        The bytes of each layer, a list of int.

    Raises:
        TypeError, ValueError: as :func:`profile`.
    """
    chain = layers_of(module)
    check_sample(input)
    check_chunks(chunks)
    check_number("param_scale", param_scale, positive=False)
    device = sizing_device(chain, device)
    with isolated(device):
        found = count_layers(chain, scatter(input, chunks)[0], device, backward=False)
    return [
        int(counted.figures["saved_bytes"] + param_scale * tensor_bytes(parameters))
        for counted, (parameters, _) in zip(found, owned(chain), strict=True)
    ]


def count_layers(module: nn.Sequential, batch: Batch, device: torch.device, *, backward: bool = True) -> list[Count]:
    """Counts every layer on `batch`: with real tensors, or with fake ones if `device` is ``meta``."""
    found: list[Count] = []
    known: dict[bytes | None, tuple[Batch, Count]] = {}  # equal fake layers are counted once: deep models repeat blocks
    mode = fake_mode() if device.type == "meta" else None

    def step(visit: Visit) -> Batch:
        if mode is None:
            output, counted = count(visit, backward=backward)
        else:
            original = module[visit.index]
            key = situation(original, visit.input)
            output, counted = known.get(key) or _count_fake(visit, original, mode, backward)
            if key is not None:
                known[key] = output, counted
        _warn(visit, counted)
        found.append(counted)
        return output

    if mode is None:
        walk(module, layerwise_sandbox(module, device), copied(batch, device), step)
    else:
        with explained():
            walk(module, fake_layers(module, mode), fake_batch(batch, mode), step)
    return found


def _warn(visit: Visit, counted: Count) -> None:
    if counted.uncounted:
        warnings.warn(
            f"layer {visit.name!r}: there is no FLOP formula for {', '.join(sorted(counted.uncounted))}, so the FLOPs "
            "of the layer are too low, and seconds that are estimated from them; register a formula with "
            "torch.utils.flop_counter.register_flop_formula",
            stacklevel=2,
        )


def _count_fake(visit: Visit, original: nn.Module, mode: Any, backward: bool) -> tuple[Batch, Count]:
    @contextmanager
    def faked() -> Iterator[None]:
        with mode, FusedAttention():
            yield

    output, counted = count(visit, backward=backward, mode=faked)
    for tensor in output:
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"the bytes of an output of layout {tensor.layout} depend on its values, and without a device there "
                "are none; use device='cpu'"
            )
    if counted.unsized:
        real = replace(visit, layer=materialised(original), input=enter_batch(zeros_like(visit.input)))
        _, counted = count(real, backward=backward)
    return output, counted
