"""Tell the allocator which stream still reads a tensor."""

from __future__ import annotations

import torch

from ._stream import AbstractStream, is_accelerator


def record_stream(tensor: torch.Tensor, stream: AbstractStream) -> None:
    """Keep the memory of ``tensor`` from being handed out again before ``stream`` is done with its present work.

    Needed whenever a tensor made on one stream of an accelerator is used on another. A view protects the whole storage
    under it. Nothing to do for the placeholder, nor for tensors that are not in the memory of an accelerator.

    Args:
        tensor: of any device.
        stream: that reads it.

    Raises:
        TypeError: `tensor` is no tensor, or `stream` no stream.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor must be a torch.Tensor; got {tensor!r} ({type(tensor).__name__})")
    # MPS has one stream, and no such operation.
    if is_accelerator(stream) and tensor.device.type == stream.device.type != "mps":
        tensor.record_stream(stream)
