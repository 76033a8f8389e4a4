"""Streams of accelerators, and a placeholder for devices without streams."""

from __future__ import annotations

from typing import TypeAlias, TypeGuard

import torch

from ._device import CPU, Device, has_streams, on_accelerator


class CPUStreamType:
    """The type of :data:`CPUStream`. There is one instance; copies and unpickled copies are the same object."""

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
"""The stream of every device that has none: its work is always in order."""

AbstractStream: TypeAlias = CPUStreamType | torch.Stream
"""A stream of an accelerator, such as a :class:`torch.cuda.Stream`, or :data:`CPUStream`."""


def new_stream(device: Device) -> AbstractStream:
    """A new stream of ``device``; :data:`CPUStream` for a device without streams.

    On CUDA it is a :class:`torch.cuda.Stream`, elsewhere a :class:`torch.Stream`. MPS has one stream only.

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
    """The current stream of this thread on ``device``; :data:`CPUStream` for a device without streams.

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
    """The default stream of ``device``; :data:`CPUStream` for a device without streams.

    Args:
        device: a ``torch.device``, or any object with ``type`` and ``index``.

    Returns:
        The stream.
    """
    if not has_streams(device):
        return CPUStream
    if device.type == "cuda":
        return torch.cuda.default_stream(on_accelerator(device))
    # The current stream is needed only for torch's numbers of its device and device type; stream 0 is the default one.
    current = torch.accelerator.current_stream(on_accelerator(device))
    return torch.Stream(0, current.device_index, current.device_type)


def get_device(stream: AbstractStream) -> torch.device:
    """The device of ``stream``; the CPU for :data:`CPUStream`.

    Args:
        stream: any stream.

    Returns:
        Its device.

    Raises:
        TypeError: `stream` is not a stream.

    >>> get_device(CPUStream)
    device(type='cpu')
    """
    return stream.device if is_accelerator(stream) else CPU


def is_accelerator(stream: AbstractStream) -> TypeGuard[torch.Stream]:
    """Whether ``stream`` belongs to an accelerator, so that other work has to wait for it.

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
        f"got {stream!r} ({type(stream).__name__}); current_stream(device) gives the one of a device"
    )


def is_cuda(stream: AbstractStream) -> TypeGuard[torch.cuda.Stream]:
    """Whether ``stream`` is a CUDA stream; see :func:`is_accelerator` for those of any accelerator.

    Args:
        stream: any stream.

    Returns:
        False for :data:`CPUStream` and other accelerators' streams.

    Raises:
        TypeError: `stream` is not a stream.
    """
    return is_accelerator(stream) and stream.device.type == "cuda"


def as_cuda(stream: AbstractStream) -> torch.cuda.Stream:
    """``stream`` itself, with the type of a CUDA stream.

    Args:
        stream: any stream.

    Returns:
        `stream`.

    Raises:
        TypeError: `stream` is not a CUDA stream.
    """
    if is_cuda(stream):
        return stream
    raise TypeError(f"stream must be a torch.cuda.Stream here; got {stream!r}; ask is_cuda(stream) first")
