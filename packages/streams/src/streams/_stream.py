"""Accelerator streams, and a placeholder for devices that have none."""

from __future__ import annotations

from typing import TypeAlias, TypeGuard

import torch

from ._device import CPU, Device, has_streams, on_accelerator


class CPUStreamType:
    """The type of :data:`CPUStream`, a singleton; copying or unpickling it returns the same object."""

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
"""The stream of every device that has none, on which work is always in order."""

AbstractStream: TypeAlias = CPUStreamType | torch.Stream
"""A stream of an accelerator, such as a :class:`torch.cuda.Stream`, or :data:`CPUStream`."""


def new_stream(device: Device) -> AbstractStream:
    """Create a stream on ``device``; return :data:`CPUStream` for a device without streams.

    On CUDA it is a :class:`torch.cuda.Stream`, elsewhere a :class:`torch.Stream`. MPS has only one stream.

    Args:
        device: a ``torch.device``, or any object with ``type`` and ``index``.

    Returns:
        The stream.
    """
    if not has_streams(device):
        return CPUStream
    if device.type == "cuda":
        return torch.cuda.Stream(on_accelerator(device))  # type: ignore[no-untyped-call]
    return torch.Stream(on_accelerator(device))


def current_stream(device: Device) -> AbstractStream:
    """Return this thread's current stream on ``device``; :data:`CPUStream` for a device without streams.

    Args:
        device: a ``torch.device``, or any object with ``type`` and ``index``.

    Returns:
        The stream.
    """
    if not has_streams(device):
        return CPUStream
    if device.type == "cuda":
        return torch.cuda.current_stream(on_accelerator(device))
    return torch.accelerator.current_stream(on_accelerator(device))


def default_stream(device: Device) -> AbstractStream:
    """Return the default stream of ``device``; :data:`CPUStream` for a device without streams.

    Args:
        device: a ``torch.device``, or any object with ``type`` and ``index``.

    Returns:
        The stream.
    """
    if not has_streams(device):
        return CPUStream
    if device.type == "cuda":
        return torch.cuda.default_stream(on_accelerator(device))
    # Stream 0 is the default stream. The current stream only provides torch's indices of device and device type.
    current = torch.accelerator.current_stream(on_accelerator(device))
    return torch.Stream(0, current.device_index, current.device_type)


def get_device(stream: AbstractStream) -> torch.device:
    """Return the device of ``stream``; the CPU for :data:`CPUStream`.

    Args:
        stream: any stream.

    Returns:
        The device.

    Raises:
        TypeError: `stream` is not a stream.

    >>> get_device(CPUStream)
    device(type='cpu')
    """
    return stream.device if is_accelerator(stream) else CPU


def is_accelerator(stream: AbstractStream) -> TypeGuard[torch.Stream]:
    """Return whether ``stream`` belongs to an accelerator, so that other work must be synchronized with it.

    Args:
        stream: any stream.

    Returns:
        False for :data:`CPUStream`.

    Raises:
        TypeError: `stream` is not a stream.
    """
    if stream is CPUStream:
        return False
    if isinstance(stream, torch.Stream):
        return True
    raise TypeError(
        "stream must be CPUStream or a torch.Stream, such as a torch.cuda.Stream; "
        f"got {stream!r} ({type(stream).__name__}); current_stream(device) returns one"
    )


def is_cuda(stream: AbstractStream) -> TypeGuard[torch.cuda.Stream]:
    """Return whether ``stream`` is a CUDA stream; use :func:`is_accelerator` for any accelerator.

    Args:
        stream: any stream.

    Returns:
        False for :data:`CPUStream` and for streams of other accelerators.

    Raises:
        TypeError: `stream` is not a stream.
    """
    return is_accelerator(stream) and stream.device.type == "cuda"


def as_cuda(stream: AbstractStream) -> torch.cuda.Stream:
    """Return ``stream`` itself, typed as a CUDA stream.

    Args:
        stream: any stream.

    Returns:
        `stream`.

    Raises:
        TypeError: `stream` is not a CUDA stream.
    """
    if is_cuda(stream):
        return stream
    raise TypeError(f"stream must be a torch.cuda.Stream here; got {stream!r}; check is_cuda(stream) first")
