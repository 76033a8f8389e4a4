"""Order work across streams: events, waits, and memory that is still in use on a second stream."""

from collections.abc import Sequence
from typing import TypeAlias

import torch

from ._stream import AbstractStream, is_accelerator

AbstractEvent: TypeAlias = torch.Event | None
"""A :class:`torch.Event` of an accelerator, or ``None`` for the CPU, whose work is complete when it is recorded."""


def record_event(stream: AbstractStream, *, timed: bool = False) -> AbstractEvent:
    """Record an event after all work queued on ``stream``.

    Args:
        stream: the stream.
        timed: enable ``elapsed_time`` between two events, at a small cost.

    Returns:
        The event; None for :data:`CPUStream`.

    Raises:
        TypeError: `stream` is not a stream.

    >>> from streams import CPUStream
    >>> record_event(CPUStream) is None
    True
    """
    if not is_accelerator(stream):
        return None
    event = torch.Event(stream.device, enable_timing=timed)
    event.record(stream)
    return event


def wait_event(source: AbstractStream, event: AbstractEvent) -> None:
    """Make ``source`` wait for ``event``.

    A stream of an accelerator waits on the device. If ``source`` is the CPU, this call blocks. If ``event`` is None,
    nothing waits.

    Args:
        source: the stream that waits.
        event: an event from :func:`record_event`.

    Raises:
        TypeError: `source` is not a stream.
    """
    if is_accelerator(source):  # raises if it is not a stream, even without an event
        if event is not None:
            source.wait_event(event)
    elif event is not None:
        event.synchronize()


def wait_stream(source: AbstractStream, target: AbstractStream) -> None:
    """Make ``source`` wait for all work queued on ``target`` so far.

    A stream of an accelerator waits on the device. If ``source`` is the CPU, this call blocks. If ``target`` is the
    CPU, nothing waits.

    Args:
        source: the stream that waits.
        target: the stream that it waits for.

    Raises:
        TypeError: `source` or `target` is not a stream.
    """
    if is_accelerator(target) and not is_accelerator(source):
        target.synchronize()
    else:
        wait_event(source, record_event(target))


def record_stream(tensor: torch.Tensor, stream: AbstractStream) -> None:
    """Keep the memory of ``tensor`` from being reused before the work queued on ``stream`` is complete.

    Call this whenever a tensor that was allocated on one stream of an accelerator is used on another one. For a view,
    it keeps the whole storage. It does nothing for :data:`CPUStream`, or if tensor and stream are on different device
    types.

    Args:
        tensor: a tensor on any device.
        stream: the stream that reads it.

    Raises:
        TypeError: `tensor` is not a tensor, or `stream` is not a stream.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor must be a torch.Tensor; got {tensor!r} ({type(tensor).__name__})")
    # MPS has one stream, and does not implement record_stream.
    if is_accelerator(stream) and tensor.device.type == stream.device.type != "mps":
        for part in _with_memory(tensor):
            part.record_stream(stream)


def _with_memory(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the tensors whose memory ``tensor`` uses, because torch can record only the parts of a sparse tensor."""
    # Sparse gradients of embeddings have this layout. Torch rejects other sparse layouts, which no module produces.
    return (tensor._indices(), tensor._values()) if tensor.layout is torch.sparse_coo else (tensor,)
