"""Count the bytes and FLOPs of each layer by running it once."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from microbatch import Batch, flatten

from ._allocations import AllocationTracker
from ._data import LayerProfile
from ._ends import SEED, copy_batch, enter_batch, ones_backward_root
from ._forms import compute_form
from ._skips import find_routes
from ._storages import storages, tensor_bytes
from ._walk import Visit, walk
from .fake import blank_batch, blank_layer, fake_mode, faking
from .memory import owned_bytes
from .sandbox import copy_on


class _Count(NamedTuple):
    """The counts of a layer: its output, fields of a :class:`LayerProfile`, and the operations without a formula."""

    output: Batch
    figures: dict[str, int]
    uncounted: set[str]
    unsized: bool


def count_layers(
    chain: nn.Sequential, batch: Batch, device: torch.device, *, backward: bool = True
) -> list[LayerProfile]:
    """Count the bytes and FLOPs of every layer on `batch`, with fake tensors if `device` is ``meta``.

    The profiles have no seconds. With `backward`, peaks and FLOPs include the backward.
    """
    found: list[_Count] = []
    count: Callable[[Visit], _Count] = partial(_count, backward=backward)
    copy, first = partial(copy_on, device=device), partial(copy_batch, device=device)
    if device.type == "meta":
        mode = fake_mode()
        # Count equal layers once, because deep models repeat blocks.
        count = partial(_count_fake, known={}, mode=mode, backward=backward)
        copy, first = partial(blank_layer, mode=mode), partial(blank_batch, mode=mode)

    def step(visit: Visit) -> Batch:
        found.append(count(visit))
        _warn(visit.name, found[-1].uncounted)
        return found[-1].output

    with _uncompiled():
        walk(chain, copy, first(batch), step)
    return [
        LayerProfile(name, type(layer).__name__, None, None, **own, **counted.figures)
        for name, layer, own, counted in zip(chain._modules, chain, owned_bytes(chain), found, strict=True)
    ]


def _uncompiled() -> AbstractContextManager[object]:
    """Run compiled modules eagerly inside this context; dispatch modes miss the allocations of compiled code."""
    # Without torch._dynamo, which is slow to import, no module can be compiled.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _count_fake(visit: Visit, known: dict[bytes, _Count], mode: Any, backward: bool) -> _Count:
    key = count_key(visit.original, visit.input)
    if key is not None and key in known:
        return known[key]
    counted = _count(visit, backward, partial(faking, mode))
    for tensor in counted.output:
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"the bytes of an output of layout {tensor.layout} depend on its values, which do not exist without a "
                "device; use device='cpu'"
            )
    if counted.unsized:
        real = visit._replace(layer=blank_layer(visit.original), input=blank_batch(visit.input))
        counted = _count(real, backward)._replace(output=counted.output)
    if key is not None:
        known[key] = counted
    return counted


def _count(visit: Visit, backward: bool, mode: Callable[[], AbstractContextManager[object]] = nullcontext) -> _Count:
    """Run the forward, and count the storages that stay alive: the output and the tensors saved by the graph.

    Then run the backward, for the peak and FLOPs. The layer runs on a copy of its input, and the next layer gets a copy
    of its output, so the storages that stay alive are the ones that this layer needs.
    """
    entered, tracker = enter_batch(visit.input, copies=True), AllocationTracker()
    inputs = _watch(entered)
    with mode(), tracker:
        output, roots = visit.forward(entered)
    saved, given = tracker.alive(), tensor_bytes(output.value)
    outputs, next_input = _watch(output), copy_batch(output)
    ones_root = ones_backward_root(roots) if roots and backward else None
    # After this, inputs are alive only if the graph or the output needs them, and outputs only if the graph does.
    del entered, roots
    freed = _count_freed_bytes(inputs)
    del output
    passing = _count_freed_bytes(outputs)
    if ones_root is not None:
        with mode(), tracker:
            torch.autograd.backward(ones_root, SEED)
    figures = {
        "saved_bytes": saved,
        "output_bytes": given,
        "peak_bytes": tracker.peak,
        "flops": tracker.flops,
        "passing_bytes": passing,
        "freed_bytes": freed,
    }
    return _Count(next_input, figures, tracker.uncounted, tracker.unsized)


def _warn(name: str, uncounted: set[str]) -> None:
    if uncounted:
        warnings.warn(
            f"layer {name!r}: there is no FLOP formula for {', '.join(sorted(uncounted))}, so the FLOPs of the layer, "
            "and seconds estimated from them, are too low; register a formula with "
            "torch.utils.flop_counter.register_flop_formula",
            stacklevel=2,
        )


_Watched = list[tuple["weakref.ref[torch.UntypedStorage]", int]]


def _watch(tensors: Iterable[torch.Tensor]) -> _Watched:
    found = {storage._cdata: storage for storage in storages(list(tensors))}
    return [(weakref.ref(storage), storage.nbytes()) for storage in found.values()]


def _count_freed_bytes(watched: _Watched) -> int:
    return sum(size for ref, size in watched if ref() is None)


def count_key(layer: nn.Module, value: Batch) -> bytes | None:
    """Return a key of everything that a count with fake tensors depends on; None if it cannot be computed.

    Layers with skips have no key.
    """
    return None if find_routes(layer) else compute_form((layer, flatten(value.value)))
