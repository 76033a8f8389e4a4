"""The devices that queue their work on streams: those of torch's accelerator, of any type."""

from __future__ import annotations

import torch

from ._device import Device, accelerator, check


def has_streams(device: Device) -> bool:
    """Whether work on ``device`` is queued on streams, as on CUDA, XPU, MPS, and what registers as PrivateUse1.

    Args:
        device: a ``torch.device``, or any object with ``type`` and ``index``.

    Returns:
        False for the CPU.

    Raises:
        TypeError: `device` is not a device.

    >>> has_streams(torch.device("cpu"))
    False
    """
    kind = device_type(device)
    # True for "cuda" even on a CPU build, so that using the device raises torch's error.
    return kind != "cpu" and (kind == "cuda" or kind == accelerator())


def device_type(device: Device) -> str:
    """``device.type``; TypeError if `device` is not a device."""
    try:
        return device.type
    except AttributeError:
        check(device)
        raise


def on_accelerator(device: Device) -> torch.device:
    """``device`` as a torch.device; ValueError if the machine does not have it."""
    check(device)
    return torch.device(device.type) if device.index is None else torch.device(device.type, device.index)
