"""Tell the allocator which stream still reads a tensor."""

from __future__ import annotations

import torch

from ._stream import AbstractStream, is_accelerator


def record_stream(tensor: torch.Tensor, stream: AbstractStream) -> None:
    """Keep the memory of ``tensor`` from being reused before ``stream`` has done its present work.

    Call this whenever a tensor that was made on one stream of an accelerator is used on another. For a view, the whole
    storage is kept. Does nothing for :data:`CPUStream`, and for tensors that are not in the memory of an accelerator.

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
        tensor.record_stream(stream)
