"""Device helpers: validate, normalize and compare devices, and find out which ones have streams."""

from collections.abc import Hashable
from typing import Protocol

import torch

CPU = torch.device("cpu")
"""Created once, because torch function modes intercept every call of ``torch.device``."""


class Device(Hashable, Protocol):
    """Anything hashable with a ``type`` and an ``index``; :class:`torch.device` is one."""

    @property
    def type(self) -> str: ...

    @property
    def index(self) -> int | None: ...


def has_streams(device: Device) -> bool:
    """Return whether work on ``device`` is queued on streams, as on CUDA, XPU, MPS and PrivateUse1 backends.

    Args:
        device: a ``torch.device``, or any object with ``type`` and ``index``.

    Returns:
        True for accelerators, False for the CPU and ``meta``.

    Raises:
        TypeError: `device` is not a device.

    >>> has_streams(torch.device("cpu"))
    False
    """
    if not hasattr(device, "type"):
        check(device)
    # "cuda" counts even in a CPU build, so that using the device raises an error instead of running on the CPU.
    return device.type == "cuda" or (device.type != "cpu" and device.type == accelerator())


def on_accelerator(device: Device) -> torch.device:
    check(device)
    return torch.device(device.type) if device.index is None else torch.device(device.type, device.index)


def normalise(device: Device) -> Device:
    """Normalize ``device``: an accelerator without an index gets the current index, and ``cpu:k`` becomes ``cpu``."""
    if device.type == "cpu":
        return CPU
    if device.index is None and device.type == accelerator():
        return torch.device(device.type, torch.accelerator.current_device_index())
    return device


def check(device: object, name: str = "device") -> None:
    """Check that ``device`` is a device of this machine.

    Args:
        device: any object.
        name: the name of the argument in error messages.

    Raises:
        TypeError: `device` is not a device, or not hashable.
        ValueError: torch does not find it, or uses accelerators of a different type.
    """
    if not hasattr(device, "type") or not hasattr(device, "index"):
        raise TypeError(
            f"{name} must have a .type and an .index, as torch.device('cuda', 0) does; "
            f"got {device!r} ({type(device).__name__}); wrap names and numbers in torch.device(...)"
        )
    if type(device).__hash__ is None:
        raise TypeError(f"{name} must be hashable, because devices are the keys of workers; got {device!r}")
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
