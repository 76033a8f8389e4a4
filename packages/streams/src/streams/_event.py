"""Events: points in the queue of a stream that other streams can wait for."""

from __future__ import annotations

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

    A stream of an accelerator waits on the device, and this call returns at once. If ``source`` is the CPU, this call
    blocks. For ``None`` there is nothing to wait for.

    Args:
        source: the stream that waits.
        event: an event from :func:`record_event`.

    Raises:
        TypeError: `source` is not a stream.
    """
    if event is None:
        is_accelerator(source)  # raises if it is not a stream
    elif is_accelerator(source):
        source.wait_event(event)
    else:
        event.synchronize()
