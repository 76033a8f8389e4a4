"""A stream: an accelerator's, or the placeholder that stands for one where there is nothing to order."""

from __future__ import annotations

from typing import TypeAlias, TypeGuard

import torch

from ._accelerator import has_streams, on_accelerator
from ._device import CPU, Device


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
"""The stream of every device that has none: work on it is in order by itself."""

AbstractStream: TypeAlias = CPUStreamType | torch.Stream
"""A stream of an accelerator, such as a :class:`torch.cuda.Stream`, or :data:`CPUStream`."""


def new_stream(device: Device) -> AbstractStream:
    """A fresh stream of ``device``; :data:`CPUStream` unless its work is queued on streams.

    On CUDA it is a :class:`torch.cuda.Stream`, elsewhere a plain :class:`torch.Stream`. MPS has one stream, which is
    given again.

    Args:
        device: as torch takes it, or anything with a type and an index.

    Returns:
        The stream.
    """
    if not has_streams(device):
        return CPUStream
    if device.type == "cuda":
        return torch.cuda.Stream(on_accelerator(device))  # type: ignore[no-untyped-call]
    return torch.Stream(on_accelerator(device))


def current_stream(device: Device) -> AbstractStream:
    """The stream that this thread works on now, on ``device``.

    Args:
        device: as torch takes it, or anything with a type and an index.

    Returns:
        The stream.
    """
    if not has_streams(device):
        return CPUStream
    if device.type == "cuda":
        return torch.cuda.current_stream(on_accelerator(device))
    return torch.accelerator.current_stream(on_accelerator(device))


def default_stream(device: Device) -> AbstractStream:
    """The stream that ``device`` uses unless another one is current.

    Args:
        device: as torch takes it, or anything with a type and an index.

    Returns:
        The stream.
    """
    if not has_streams(device):
        return CPUStream
    if device.type == "cuda":
        return torch.cuda.default_stream(on_accelerator(device))
    # The current one only tells torch's number of its device and of its type; number 0 is the default everywhere.
    current = torch.accelerator.current_stream(on_accelerator(device))
    return torch.Stream(0, current.device_index, current.device_type)


def get_device(stream: AbstractStream) -> torch.device:
    """The device of ``stream``; the CPU for :data:`CPUStream`.

    Args:
        stream: any.

    Returns:
        Its device.

    Raises:
        TypeError: `stream` is no stream.

    >>> get_device(CPUStream)
    device(type='cpu')
    """
    if is_accelerator(stream):
        return stream.device
    return CPU


def is_accelerator(stream: AbstractStream) -> TypeGuard[torch.Stream]:
    """Whether ``stream`` is an accelerator's, and so anything must wait for it; TypeError if it is no stream at all.

    Args:
        stream: any.

    Returns:
        False for :data:`CPUStream`.

    Raises:
        TypeError: `stream` is no stream.
    """
    if stream is CPUStream:
        return False
    if isinstance(stream, torch.Stream):
        return True
    raise TypeError(
        "stream must be CPUStream or a torch.Stream, such as a torch.cuda.Stream; "
        f"got {stream!r} ({type(stream).__name__}); current_stream(device) gives the one of a device"
    )


def as_accelerator(stream: AbstractStream) -> torch.Stream:
    """``stream`` itself, known to be an accelerator's; TypeError for the placeholder.

    Args:
        stream: any.

    Returns:
        `stream`.

    Raises:
        TypeError: `stream` is no accelerator's.
    """
    if is_accelerator(stream):
        return stream
    raise TypeError(f"stream must be a torch.Stream here; got {stream!r}; ask is_accelerator(stream) first")


def is_cuda(stream: AbstractStream) -> TypeGuard[torch.cuda.Stream]:
    """Whether ``stream`` is a CUDA stream; :func:`is_accelerator` asks for any accelerator's.

    Args:
        stream: any.

    Returns:
        False for :data:`CPUStream` and other accelerators' streams.

    Raises:
        TypeError: `stream` is no stream.
    """
    return is_accelerator(stream) and stream.device.type == "cuda"


def as_cuda(stream: AbstractStream) -> torch.cuda.Stream:
    """``stream`` itself, known to be a CUDA stream; TypeError for any other.

    Args:
        stream: any.

    Returns:
        `stream`.

    Raises:
        TypeError: `stream` is no CUDA stream.
    """
    if is_cuda(stream):
        return stream
    raise TypeError(f"stream must be a torch.cuda.Stream here; got {stream!r}; ask is_cuda(stream) first")
