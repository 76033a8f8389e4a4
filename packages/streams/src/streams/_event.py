"""Points in a stream that others can wait for."""

from __future__ import annotations

from typing import TypeAlias

import torch

from ._stream import AbstractStream, is_accelerator

AbstractEvent: TypeAlias = torch.Event | None
"""A :class:`torch.Event` of an accelerator, or ``None``: of the CPU, whose work is done by the time it is recorded."""


def record_event(stream: AbstractStream, *, timed: bool = False) -> AbstractEvent:
    """The point after everything that is queued on ``stream`` now; ``None`` for the placeholder.

    Args:
        timed: whether ``elapsed_time`` between two of them is wanted, which costs a little.

    Returns:
        The event, or None for the placeholder.

    Raises:
        TypeError: `stream` is no stream.

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

    A stream of an accelerator waits where it runs, and this call returns at once. When ``source`` is the CPU, this call
    itself waits. For ``None`` there is nothing to wait.

    Args:
        source: who waits.
        event: of :func:`record_event`.

    Raises:
        TypeError: `source` is no stream.
    """
    if event is None:
        is_accelerator(source)  # raises if it is no stream
    elif is_accelerator(source):
        source.wait_event(event)
    else:
        event.synchronize()
