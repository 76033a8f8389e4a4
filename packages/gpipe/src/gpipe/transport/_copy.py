"""How tensors change devices without making computation wait.

A copy runs on streams of its own, after what the source has queued so far; the target's computation waits for just this
copy. Every tensor is recorded with each stream that reads it, so that the allocator hands nothing out again too early::

    source computes   --y--x------------------->        x: copy waits for y
    copy streams            \\--copy--x                  x: event
    target computes  ------------------\\--reads-->
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from microbatch import Batch
from streams import (
    AbstractEvent,
    AbstractStream,
    is_accelerator,
    record_event,
    record_stream,
    use_stream,
    wait_event,
    wait_stream,
)

from ..values._leaves import map_batch
from ..values._sharing import parted

Payload = Batch | list[Tensor | None]
Parcel = tuple[Payload, AbstractEvent]


class Place(NamedTuple):
    """Where a stage computes, and the stream of that device on which values come and go."""

    device: torch.device
    compute: AbstractStream
    copy: AbstractStream


def carrier(source: Place, target: Place) -> Copy | None:
    """What takes tensors from ``source`` to ``target``; None if they are there already."""
    return None if source.device == target.device else Copy(source, target)


class Copy:
    """Copies between two devices, at least one of them an accelerator."""

    def __init__(self, source: Place, target: Place) -> None:
        self._source = source
        self._target = target

    def send(self, payload: Payload) -> Parcel:
        """Queue the copy; called where the source computes."""
        source, target = self._source, self._target
        if is_accelerator(source.copy):
            wait_stream(source.copy, source.compute)
        # torch orders a copy between two accelerators with the current stream of both, so both have to be copy streams.
        with use_stream(target.copy), use_stream(source.copy):
            copies = _each(payload, self._copy)
        _each(payload, lambda tensor: _recorded(tensor, source.copy))
        last = target.copy if is_accelerator(target.copy) else source.copy
        return (parted(copies) if isinstance(copies, Batch) else copies), record_event(last)

    def receive(self, parcel: Parcel) -> Payload:
        """Let the target's computation wait for the copy; called there."""
        payload, event = parcel
        compute = self._target.compute
        wait_event(compute, event)
        if is_accelerator(compute):
            return _each(payload, lambda tensor: _recorded(tensor, compute))
        return payload

    def _copy(self, tensor: Tensor) -> Tensor:
        copy = tensor.detach().to(self._target.device, non_blocking=True)
        return copy.requires_grad_() if tensor.requires_grad else copy


def _each(payload: Payload, function: object) -> Payload:
    if isinstance(payload, Batch):
        return map_batch(payload, function)  # type: ignore[arg-type]
    return [None if tensor is None else function(tensor) for tensor in payload]  # type: ignore[operator]


def _recorded(tensor: Tensor, stream: AbstractStream) -> Tensor:
    record_stream(tensor, stream)
    return tensor
