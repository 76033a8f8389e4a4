"""Counts the bytes of each layer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from microbatch import Batch, scatter

from ._alike import situation
from ._allocator import meter_for
from ._arguments import check_chunks, check_sample, check_scale, fewest_rows, sizing_device
from ._count import Count, count, count_forward
from ._data import SkipProfile
from ._enter import copy_to, enter_batch
from ._fake import explained, fake_batch, fake_layers, fake_mode, materialised, zeros_like
from ._isolation import isolated
from ._layers import layers_of
from ._loose import Loose
from ._owned import owned
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
    and the input do not count; a tensor that several layers share counts for the first. They are measured on one row of
    `input` and multiplied by the rows of a micro-batch; if a layer raises for a single row, on the first micro-batch.

    On the device ``"meta"`` nothing is computed and no memory is allocated: models of any size take seconds, and the
    bytes are those of a CPU.

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
    check_scale(param_scale)
    device = sizing_device(chain, device)
    with isolated(device):
        saved = _saved_bytes(chain, input, chunks, device)
    return [
        int(saved + param_scale * tensor_bytes(own.parameters)) for saved, own in zip(saved, owned(chain), strict=True)
    ]


def _saved_bytes(module: nn.Sequential, value: Any, chunks: int, device: torch.device) -> list[float]:
    """Saved bytes of a micro-batch: those of a single row, times its rows, if every layer can compute a single row."""

    def saved(batch: Batch, scale: float) -> list[float]:
        return [found.saved * scale for found in count_forwards(module, batch, device)]

    rows = fewest_rows(value)
    microbatch = scatter(value, chunks)[0]
    if rows <= 1:
        return saved(microbatch, 1)
    try:
        return saved(scatter(value, rows)[0], rows / chunks)
    except Exception:
        # Batch norm, for example, cannot normalise a single row. Any other error of the layer is raised again here.
        return saved(microbatch, 1)


def count_forwards(module: nn.Sequential, batch: Batch, device: torch.device) -> list[Count]:
    """Counts the forward of every layer on `batch`: with real tensors, or with fake ones if `device` is ``meta``."""
    return _count(module, batch, device, lambda visit, _, mode: count_forward(visit, mode)).layers


def count_layers(module: nn.Sequential, batch: Batch, device: torch.device, *, split: bool) -> Counts:
    """Like `count_forwards`, with the backward, and with what passes from layer to layer."""

    def counted(visit: Visit, loose: Sequence[Loose], mode: AbstractContextManager[object]) -> tuple[Batch, Count]:
        return count(visit, loose, split=split, mode=mode, meter=lambda: meter_for(device))

    return _count(module, batch, device, counted)


class Counts(NamedTuple):
    """What was counted of all layers, and the skips between them."""

    layers: list[Count]
    skips: list[SkipProfile]


CountOne = Callable[[Visit, Sequence[Loose], AbstractContextManager[object]], tuple[Batch, Count]]
"""Counts a layer, given the storages of its input that no earlier layer needs, and a context to run in."""


def _count(module: nn.Sequential, batch: Batch, device: torch.device, one: CountOne) -> Counts:
    found = Counts([], [])
    if device.type == "meta":
        with explained():
            _count_fakes(module, batch, one, found)
        return found

    def step(visit: Visit) -> Batch:
        output, counted = one(visit, found.layers[-1].loose if found.layers else (), nullcontext())
        _add(found, counted, visit)
        return output

    walk(module, layerwise_sandbox(module, device), copy_to(batch, device), step)
    return found


def _add(found: Counts, counted: Count, visit: Visit) -> None:
    found.layers.append(counted)
    found.skips[:] = visit.skips.arrived


def _count_fakes(module: nn.Sequential, batch: Batch, one: CountOne, found: Counts) -> None:
    """Counts equal layers once: deep models repeat a few blocks."""
    mode = fake_mode()
    known: dict[Hashable, tuple[Batch, Count]] = {}
    alive: list[Batch] = []  # keys contain identities of these

    def step(visit: Visit) -> Batch:
        loose, original = found.layers[-1].loose if found.layers else (), module[visit.index]
        key = situation(original, visit.input, loose)
        output, counted = known.get(key) or _count_fake(visit, original, loose, one, mode)
        if key is not None and key not in known:
            known[key] = output, counted
            alive.append(visit.input)
        _add(found, counted, visit)
        return output

    walk(module, fake_layers(module, mode), fake_batch(batch, mode), step)


def _count_fake(
    visit: Visit, original: nn.Module, loose: Sequence[Loose], one: CountOne, mode: AbstractContextManager[object]
) -> tuple[Batch, Count]:
    output, counted = one(visit, loose, mode)
    if counted.workspace:
        real = replace(visit, layer=materialised(original), input=enter_batch(zeros_like(visit.input)))
        _, counted = one(real, loose, nullcontext())
    _expect_known_size(output)
    return output, counted


def _expect_known_size(output: Batch) -> None:
    for tensor in output:
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"the bytes of an output of layout {tensor.layout} depend on its values, and without a device there "
                "are none; use device='cpu'"
            )
