"""Make one stream wait for another."""

from __future__ import annotations

from ._event import record_event, wait_event
from ._stream import AbstractStream, is_accelerator


def wait_stream(source: AbstractStream, target: AbstractStream) -> None:
    """Make ``source`` wait for everything queued on ``target`` so far.

    Between two streams of accelerators the device waits and this call returns at once. When ``source`` is the CPU, this
    call itself waits. Nothing has to wait for the CPU: its work is done when the call that does it returns.

    Args:
        source: the stream that waits.
        target: what is waited for.

    Raises:
        TypeError: one of them is no stream.
    """
    if is_accelerator(target) and not is_accelerator(source):
        target.synchronize()
    else:
        wait_event(source, record_event(target))
