"""Copy tensors between devices without stalling computation.

A copy runs on separate streams, after the work that the source has queued so far. The target's computation waits for
this copy only. Incoming and outgoing values and gradients each have their own stream: on a shared one, the next value
would arrive only after the last output had been sent. Every tensor is recorded on each stream that reads it::

    source computes   --y--x------------------->        x: copy waits for y
    copy streams            \\--copy--x                  x: event
    target computes  ------------------\\--reads-->

Copies from and to the CPU use pinned memory, because a copy of pageable memory blocks the worker until all work that
the copy waits for has finished.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from streams import (
    AbstractEvent,
    AbstractStream,
    is_accelerator,
    new_stream,
    record_event,
    record_stream,
    use_stream,
    wait_event,
    wait_stream,
)

from ..values._leaves import Activation
from ..values._sharing import as_copied

Payload = Activation | list[Tensor | None]
Parcel = tuple[Payload, AbstractEvent]


class Place(NamedTuple):
    """The device of a stage, its compute stream, and the stream that copies tensors to or from it."""

    device: torch.device
    compute: AbstractStream
    copy: AbstractStream


class CopyStreams(NamedTuple):
    """The streams that copy tensors to and from a stage."""

    values_in: AbstractStream
    values_out: AbstractStream
    gradients_in: AbstractStream
    gradients_out: AbstractStream

    @classmethod
    def on(cls, device: torch.device) -> CopyStreams:
        return cls(*[new_stream(device) for _ in cls._fields])


StagePlace = tuple[torch.device, AbstractStream, CopyStreams]
"""The device of a stage, its compute stream, and its copy streams."""


def carriers(a: StagePlace, b: StagePlace) -> tuple[Copy | None, Copy | None]:
    """Return the copies of values from stage ``a`` to stage ``b``, and of gradients back."""
    (here, computes, own), (there, computes_there, theirs) = a, b
    forth = carrier(Place(here, computes, own.values_out), Place(there, computes_there, theirs.values_in))
    back = carrier(Place(there, computes_there, theirs.gradients_out), Place(here, computes, own.gradients_in))
    return forth, back


def carrier(source: Place, target: Place) -> Copy | None:
    """Return the copy from ``source`` to ``target``; None if both are on one device."""
    return None if source.device == target.device else Copy(source, target)


class Copy:
    """Copies between two devices, at least one of them an accelerator."""

    def __init__(self, source: Place, target: Place) -> None:
        self._source = source
        self._target = target
        self._pins = source.device.type == "cpu" and can_pin(target.device.type)

    def send(self, payload: Payload, after: AbstractEvent | None = None) -> Parcel:
        """Queue the copy.

        Without ``after``, call this on the source's worker. ``after`` is an event of the source's stream that follows
        the computation of the payload; with it, any thread may call this.
        """
        source, target = self._source, self._target
        if after is not None:
            wait_event(source.copy, after)
        elif is_accelerator(source.copy):
            # The compute stream has the work that computes the values queued; the host does not wait.
            wait_stream(source.copy, source.compute)
        # torch synchronizes a copy between accelerators with the current streams of both, so both must be copy streams.
        with use_stream(target.copy), use_stream(source.copy):
            copies = _each(payload, self._copy)
        # The sender may free the tensors at once, and its stream would then overwrite memory that the copy still reads.
        _each(payload, lambda tensor: record_use(tensor, source.copy))
        # Between two accelerators, the copy runs on the source's stream, and torch makes the target's stream wait for
        # it, so an event on the target's stream follows both.
        last = target.copy if is_accelerator(target.copy) else source.copy
        return (as_copied(copies) if isinstance(copies, Activation) else copies), record_event(last)

    def receive(self, parcel: Parcel) -> Payload:
        """Make the target's computation wait for the copy, on its worker."""
        payload, event = parcel
        return wait_for_payload(payload, event, self._target.compute)

    def _copy(self, tensor: Tensor) -> Tensor:
        # Links carry leaves: if the copy had a graph, the backward of one stage would run into another stage.
        copy = self._move(tensor.detach())
        return copy.requires_grad_() if tensor.requires_grad else copy

    def _move(self, tensor: Tensor) -> Tensor:
        if self._target.device.type == "cpu":
            return to_host(tensor)
        if self._pins and _is_plain(tensor):
            # Even pinned memory: its owner may change it before it is read.
            tensor = allocate_pinned_like(tensor).copy_(tensor)
        return tensor.to(self._target.device, non_blocking=True)


def wait_for_payload(payload: Payload, event: AbstractEvent, compute: AbstractStream) -> Payload:
    """Make ``compute`` wait for ``event``, which is recorded after all writes to ``payload``."""
    wait_event(compute, event)
    # The tensors were allocated on the copy stream, which could reuse their memory while this stream reads it.
    if is_accelerator(compute):
        return _each(payload, lambda tensor: record_use(tensor, compute))
    return payload


@cache
def can_pin(kind: str) -> bool:
    try:
        # Try it, because builds and drivers differ in the memory they can pin.
        torch.empty(1, device="cpu", pin_memory=True)
    except RuntimeError:
        return False
    return kind != "cpu"


def to_host(tensor: Tensor) -> Tensor:
    """Queue a copy of ``tensor`` to the host on the current stream, to pinned memory if the system has any."""
    if can_pin(tensor.device.type) and _is_plain(tensor):
        return allocate_pinned_like(tensor).copy_(tensor, non_blocking=True)
    return tensor.to("cpu", non_blocking=True)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided


def allocate_pinned_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(tensor, dtype=dtype, device="cpu", pin_memory=True)


def _each(payload: Payload, function: Callable[[Tensor], Tensor]) -> Payload:
    if isinstance(payload, Activation):
        return payload.with_tensors(map(function, payload.tensors))
    return [None if tensor is None else function(tensor) for tensor in payload]


def record_use(tensor: Tensor, stream: AbstractStream) -> Tensor:
    """Return ``tensor``, after telling the allocator not to reuse its memory before ``stream`` has read it."""
    record_stream(tensor, stream)
    return tensor
