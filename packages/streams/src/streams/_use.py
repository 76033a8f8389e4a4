"""Set the current device or stream of this thread for the length of a ``with`` block."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch

from ._accelerator import has_streams, on_accelerator
from ._device import Device
from ._stream import AbstractStream, is_accelerator

_NOTHING: AbstractContextManager[None] = nullcontext()


def use_device(device: Device) -> AbstractContextManager[object]:
    """Make ``device`` current for this thread inside a ``with`` block. Does nothing for a device without streams.

    Args:
        device: a ``torch.device``, or any object with ``type`` and ``index``.

    Returns:
        A context manager for one use.
    """
    if not has_streams(device):
        return _NOTHING
    return torch.accelerator.device_index(on_accelerator(device).index)


def use_stream(stream: AbstractStream) -> AbstractContextManager[object]:
    """Make ``stream`` and its device current for this thread inside a ``with`` block. Does nothing for
    :data:`CPUStream`.

    Unlike ``with stream`` of torch, several threads may use it with the same stream at the same time.

    Args:
        stream: any stream.

    Returns:
        A context manager for one use.

    Raises:
        TypeError: `stream` is not a stream.
    """
    if is_accelerator(stream):
        return _OnStream(stream)
    return _NOTHING


class _OnStream(AbstractContextManager[None]):
    """The context manager of :func:`use_stream`.

    Torch stores what was current before on the stream object. If another thread enters the same stream meanwhile, that
    is overwritten, and leaving sets the device and stream of the wrong thread.
    """

    __slots__ = ("_before", "_device", "_stream")

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._device = torch.accelerator.current_device_index()
        self._before = torch.accelerator.current_stream(self._stream.device)
        self._choose(self._stream, self._stream.device.index)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._choose(self._before, self._device)

    def _choose(self, stream: torch.Stream, device: int) -> None:
        torch.accelerator.set_stream(stream)
        # Not every backend sets the device of a stream together with it.
        torch.accelerator.set_device_index(device)
