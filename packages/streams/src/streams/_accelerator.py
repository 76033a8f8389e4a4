"""Which devices queue their work on streams: those of the accelerator that torch has, whatever its type."""

from __future__ import annotations

import torch

from ._device import Device, accelerator, check


def has_streams(device: Device) -> bool:
    """Whether work on ``device`` is queued on streams, as on CUDA, XPU, MPS, and what registers as PrivateUse1.

    Args:
        device: as torch has it, or anything with ``type`` and ``index``.

    Returns:
        False for the CPU.

    Raises:
        TypeError: `device` is no device.

    >>> has_streams(torch.device("cpu"))
    False
    """
    kind = device_type(device)
    # "cuda" also where torch has none, so that using it says what is missing.
    return kind != "cpu" and (kind == "cuda" or kind == accelerator())


def device_type(device: Device) -> str:
    """``device.type``; TypeError for what is no device."""
    try:
        return device.type
    except AttributeError:
        check(device)
        raise


def on_accelerator(device: Device) -> torch.device:
    """``device`` as torch knows it; ValueError if it is not there."""
    check(device)
    return torch.device(device.type) if device.index is None else torch.device(device.type, device.index)
