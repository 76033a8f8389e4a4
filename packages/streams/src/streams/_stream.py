"""A stream: a CUDA stream, or the placeholder that stands for one where there is nothing to order."""

from __future__ import annotations

from typing import TypeAlias, TypeGuard

import torch

from ._device import CPU, Device, check


class CPUStreamType:
    """The type of :data:`CPUStream`; there is one instance, which copies and unpickles as itself."""

    __slots__ = ()

    _only: CPUStreamType

    def __new__(cls) -> CPUStreamType:
        return cls._only

    def __reduce__(self) -> tuple[type[CPUStreamType], tuple[()]]:
        return CPUStreamType, ()

    def __repr__(self) -> str:
        return "CPUStream"


CPUStreamType._only = object.__new__(CPUStreamType)

CPUStream = CPUStreamType()
"""The stream of every device that is not CUDA: work on it is in order by itself."""

AbstractStream: TypeAlias = CPUStreamType | torch.cuda.Stream
"""A CUDA stream or :data:`CPUStream`."""


def new_stream(device: Device) -> AbstractStream:
    """A fresh stream of ``device``; :data:`CPUStream` unless it is a CUDA device."""
    if _device_type(device) != "cuda":
        return CPUStream
    return torch.cuda.Stream(_cuda(device))  # type: ignore[no-untyped-call]


def current_stream(device: Device) -> AbstractStream:
    """The stream that this thread works on now, on ``device``."""
    if _device_type(device) != "cuda":
        return CPUStream
    return torch.cuda.current_stream(_cuda(device))


def default_stream(device: Device) -> AbstractStream:
    """The stream on which work on ``device`` goes unless somebody chose another."""
    if _device_type(device) != "cuda":
        return CPUStream
    return torch.cuda.default_stream(_cuda(device))


def get_device(stream: AbstractStream) -> torch.device:
    """The device of ``stream``; the CPU for :data:`CPUStream`.

    >>> get_device(CPUStream)
    device(type='cpu')
    """
    if is_cuda(stream):
        return stream.device
    return CPU


def is_cuda(stream: AbstractStream) -> TypeGuard[torch.cuda.Stream]:
    """Whether ``stream`` is a CUDA stream; TypeError if it is no stream at all."""
    if stream is CPUStream:
        return False
    if isinstance(stream, torch.cuda.Stream):
        return True
    raise TypeError(
        f"stream must be CPUStream or a torch.cuda.Stream; got {stream!r} ({type(stream).__name__}); "
        "current_stream(device) gives the one of a device"
    )


def as_cuda(stream: AbstractStream) -> torch.cuda.Stream:
    """``stream`` itself, known to be a CUDA stream; TypeError for the placeholder."""
    if is_cuda(stream):
        return stream
    raise TypeError(f"stream must be a torch.cuda.Stream here; got {stream!r}; ask is_cuda(stream) first")


def _device_type(device: Device) -> str:
    try:
        return device.type
    except AttributeError:
        check(device)
        raise


def _cuda(device: Device) -> torch.device:
    check(device)
    return torch.device("cuda") if device.index is None else torch.device("cuda", device.index)
