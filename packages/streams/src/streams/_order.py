"""The order of work on different streams: events, waits, and memory that another stream still reads."""

from collections.abc import Sequence
from typing import TypeAlias

import torch

from ._stream import AbstractStream, is_accelerator

AbstractEvent: TypeAlias = torch.Event | None
"""A :class:`torch.Event` of an accelerator; ``None`` for the CPU, whose work is done when it is recorded."""


def record_event(stream: AbstractStream, *, timed: bool = False) -> AbstractEvent:
    """Record an event behind all work that is queued on ``stream``.

    Args:
        stream: the stream.
        timed: whether ``elapsed_time`` between two events is needed, which takes a little time.

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

    A stream of an accelerator waits on the device. If ``source`` is the CPU, this call blocks. ``None`` is not waited
    for.

    Args:
        source: the stream that waits.
        event: an event from :func:`record_event`.

    Raises:
        TypeError: `source` is not a stream.
    """
    if is_accelerator(source):  # raises if it is not a stream, also where there is no event
        if event is not None:
            source.wait_event(event)
    elif event is not None:
        event.synchronize()


def wait_stream(source: AbstractStream, target: AbstractStream) -> None:
    """Make ``source`` wait for everything queued on ``target`` so far.

    Between two streams of accelerators the device waits. If ``source`` is the CPU, this call blocks. If ``target`` is
    the CPU there is nothing to wait for.

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
    """Keep the memory of ``tensor`` from being reused before ``stream`` has done its present work.

    Call this whenever a tensor that was made on one stream of an accelerator is used on another. For a view, the whole
    storage is kept. Does nothing for :data:`CPUStream`, and for tensors that are not on an accelerator.

    Args:
        tensor: a tensor on any device.
        stream: the stream that reads it.

    Raises:
        TypeError: `tensor` is not a tensor, or `stream` not a stream.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor must be a torch.Tensor; got {tensor!r} ({type(tensor).__name__})")
    # MPS has one stream, and does not implement record_stream.
    if is_accelerator(stream) and tensor.device.type == stream.device.type != "mps":
        for part in _with_memory(tensor):
            part.record_stream(stream)


def _with_memory(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tensors whose memory ``tensor`` uses: torch cannot record one that is sparse, but what it consists of."""
    # Gradients of embeddings are of this layout. Torch refuses others, which no module has.
    return (tensor._indices(), tensor._values()) if tensor.layout is torch.sparse_coo else (tensor,)
