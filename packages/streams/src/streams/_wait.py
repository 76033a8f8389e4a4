"""Make one stream wait for another."""

from __future__ import annotations

from ._stream import AbstractStream, is_cuda


def wait_stream(source: AbstractStream, target: AbstractStream) -> None:
    """Make ``source`` wait for everything queued on ``target`` so far.

    Between two CUDA streams the GPU waits and this call returns at once. When ``source`` is the CPU, this call itself
    waits. Nothing ever has to wait for the CPU: its work is done by the time anybody could wait for it.
    """
    if is_cuda(source) and is_cuda(target):
        source.wait_stream(target)
    elif is_cuda(target):
        target.synchronize()
