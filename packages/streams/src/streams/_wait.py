"""Make one stream wait for another."""

from __future__ import annotations

from ._event import record_event, wait_event
from ._stream import AbstractStream, is_accelerator


def wait_stream(source: AbstractStream, target: AbstractStream) -> None:
    """Make ``source`` wait for everything queued on ``target`` so far.

    Between two streams of accelerators the device waits, and this call returns at once. If ``source`` is the CPU, this
    call blocks. If ``target`` is the CPU there is nothing to wait for: its work is done when a call returns.

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
