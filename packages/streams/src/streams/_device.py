"""Devices: which objects are devices, which of them are equal, and which have streams."""

from collections.abc import Hashable
from typing import Protocol

import torch

CPU = torch.device("cpu")
"""Made once, since a torch function mode sees each call that makes one."""


class Device(Hashable, Protocol):
    """Anything hashable with a ``type`` and an ``index``; :class:`torch.device` is one."""

    @property
    def type(self) -> str: ...

    @property
    def index(self) -> int | None: ...


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
    if not hasattr(device, "type"):
        check(device)
    # True for "cuda" even on a CPU build, so that using the device raises an error instead of running on the CPU.
    return device.type == "cuda" or (device.type != "cpu" and device.type == accelerator())


def on_accelerator(device: Device) -> torch.device:
    check(device)
    return torch.device(device.type) if device.index is None else torch.device(device.type, device.index)


def normalise(device: Device) -> Device:
    """A normal form of ``device``: an accelerator gets the current index, and ``cpu:k`` becomes ``cpu``."""
    if device.type == "cpu":
        return CPU
    if device.index is None and device.type == accelerator():
        return torch.device(device.type, torch.accelerator.current_device_index())
    return device


def check(device: object, name: str = "device") -> None:
    """Raise unless ``device`` is a device that this machine has.

    Args:
        device: any object.
        name: what errors call it.

    Raises:
        TypeError: it is no device.
        ValueError: torch does not see it, or uses accelerators of another type.
    """
    if not hasattr(device, "type") or not hasattr(device, "index"):
        raise TypeError(
            f"{name} must have a .type and an .index, as torch.device('cuda', 0) does; "
            f"got {device!r} ({type(device).__name__}); wrap names and numbers in torch.device(...)"
        )
    if type(device).__hash__ is None:
        raise TypeError(f"{name} must be hashable, to find the worker of a device; got {device!r}")
    if not has_streams(device):
        return
    if accelerator() not in (None, device.type):
        raise ValueError(
            f"{name} is {device}, but work on it cannot be ordered while torch.accelerator is {accelerator()!r}"
        )
    count = torch.accelerator.device_count()
    if (device.index or 0) >= count:
        raise ValueError(
            f"{name} is {device}, but torch sees {count} {device.type.upper()} devices; "
            "choose one that exists, or torch.device('cpu')"
        )


def accelerator() -> str | None:
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type
