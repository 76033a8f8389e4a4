"""Choose the device and the stream on which this thread works, for the length of a block."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from ._device import Device
from ._stream import AbstractStream, _cuda, _device_type, is_cuda

_NOTHING: AbstractContextManager[None] = nullcontext()


def use_device(device: Device) -> AbstractContextManager[object]:
    """Make ``device`` the current device of this thread inside the block; nothing to do unless it is a CUDA device."""
    if _device_type(device) != "cuda":
        return _NOTHING
    return torch.cuda.device(_cuda(device))


def use_stream(stream: AbstractStream) -> AbstractContextManager[object]:
    """Make ``stream`` and its device current for this thread inside the block; nothing to do for the placeholder."""
    if is_cuda(stream):
        return torch.cuda.stream(stream)
    return _NOTHING
