"""Choose the device and the stream on which this thread works, for the length of a block."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch

from ._accelerator import has_streams, on_accelerator
from ._device import Device
from ._stream import AbstractStream, is_accelerator

_NOTHING: AbstractContextManager[None] = nullcontext()


def use_device(device: Device) -> AbstractContextManager[object]:
    """Make ``device`` current for this thread inside the block; nothing to do unless its work is queued on streams.

    Args:
        device: as torch takes it, or anything with a type and an index.

    Returns:
        A context manager for one use.
    """
    if not has_streams(device):
        return _NOTHING
    return torch.accelerator.device_index(on_accelerator(device).index)


def use_stream(stream: AbstractStream) -> AbstractContextManager[object]:
    """Make ``stream`` and its device current for this thread inside the block; nothing to do for the placeholder.

    Several threads may use one stream at a time, which ``with stream`` of torch does not bear.

    Args:
        stream: any.

    Returns:
        A context manager for one use.

    Raises:
        TypeError: `stream` is no stream.
    """
    if is_accelerator(stream):
        return _OnStream(stream)
    return _NOTHING


class _OnStream(AbstractContextManager[None]):
    """The block.

    Torch's own keeps what was current before on the stream itself. A stream that another thread enters meanwhile then
    forgets it, and leaving gives one thread the device and the stream of the other.
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
        # Not every backend's streams take their device along.
        torch.accelerator.set_device_index(device)
