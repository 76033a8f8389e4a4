"""Make a device or stream current for this thread for the duration of a ``with`` block."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from ._device import Device, has_streams, on_accelerator
from ._stream import AbstractStream, is_accelerator

_NOTHING: AbstractContextManager[None] = nullcontext()


def use_device(device: Device) -> AbstractContextManager[object]:
    """Make ``device`` current for this thread inside a ``with`` block. A device without streams has no effect.

    Args:
        device: a ``torch.device``, or any object with ``type`` and ``index``.

    Returns:
        A single-use context manager.
    """
    if not has_streams(device):
        return _NOTHING
    return torch.accelerator.device_index(on_accelerator(device).index)


def use_stream(stream: AbstractStream) -> AbstractContextManager[object]:
    """Make ``stream`` and its device current for this thread inside a ``with`` block; :data:`CPUStream` has no effect.

    Unlike torch's ``with stream``, several threads may use the same stream at the same time.

    Args:
        stream: any stream.

    Returns:
        A single-use context manager.

    Raises:
        TypeError: `stream` is not a stream.

    >>> from streams import CPUStream, current_stream
    >>> with use_stream(CPUStream):
    ...     current_stream(torch.device("cpu"))
    CPUStream
    """
    return _on_stream(stream) if is_accelerator(stream) else _NOTHING


@contextmanager
def _on_stream(stream: torch.Stream) -> Iterator[None]:
    # `with stream` stores the previous device and stream on the stream object. If a second thread enters the same
    # stream, it overwrites them, and the first thread restores the wrong ones.
    device = torch.accelerator.current_device_index()
    before = torch.accelerator.current_stream(stream.device)
    try:
        _choose(stream, stream.device.index)
        yield
    finally:
        _choose(before, device)


def _choose(stream: torch.Stream, device: int) -> None:
    torch.accelerator.set_stream(stream)
    # Not every backend sets the device of a stream together with it.
    torch.accelerator.set_device_index(device)
