"""Checks of the arguments of a pipe. Errors name the argument, and are raised before anything changes."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice
from typing import Any

import torch

from streams import current_stream, has_streams, new_stream, record_event, wait_event

from ..schedule import CHECKPOINT_MODES

Device = torch.device | int | str


def checked_chunks(chunks: Any) -> int:
    try:
        number = int(chunks) if isinstance(chunks, float) and chunks.is_integer() else whole(chunks)
    except TypeError:
        raise TypeError(
            f"chunks must be an int, the number of micro-batches of a mini-batch, as in chunks=8; got {chunks!r}"
        ) from None
    if number <= 0:
        raise ValueError(f"number of chunks must be positive integer (chunks: {chunks})")
    return number


def checked_mode(mode: Any, name: str = "checkpoint") -> str:
    text = str(mode)
    if text not in CHECKPOINT_MODES:
        modes = ", ".join(map(repr, CHECKPOINT_MODES))
        raise ValueError(f"{name} is not one of {modes}: {text!r}")
    return text


def checked_flag(name: str, flag: Any) -> bool:
    if isinstance(flag, int) and flag in (0, 1):
        return bool(flag)
    raise TypeError(f"{name} must be True or False; got {flag!r}")


def checked_devices(devices: Any, partitions: int) -> list[torch.device]:
    """The ``devices``, no more than there are partitions; by default all accelerators, or CPUs."""
    if devices is not None:
        example = f"devices={['cpu'] * max(1, partitions)!r}"
        given = listed("devices", devices, "a list of devices, one for each partition", example, partitions)
        return [parsed_device(device, f"devices[{j}]") for j, device in enumerate(given)]
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is not None and here.type != "mps":  # there is never more than one MPS device
        return [torch.device(here.type, k) for k in range(torch.accelerator.device_count())]
    return [torch.device("cpu")] * partitions


def checked_places(devices: Any, partitions: int) -> list[torch.device]:
    """A device for each partition; IndexError if there are too few."""
    places = checked_devices(devices, partitions)
    if len(places) < partitions:
        raise IndexError(
            f"too few devices to hold given partitions (devices: {len(places)}, partitions: {partitions}); a device "
            "may be given several times"
        )
    return places[:partitions]


def listed(name: str, given: Any, what: str, example: str, most: int | None = None) -> list[Any]:
    """``given`` as a list of its first ``most`` entries; TypeError if it has no entries, or no order."""
    try:
        entries = iter(given)
    except TypeError:  # also of a tensor without dimensions, which says that it is iterable
        entries = None
    if entries is None or isinstance(given, (str, bytes, set, frozenset, dict)):
        raise TypeError(f"{name} must be {what}, as in {example}; got {given!r}")
    return list(islice(entries, most))


def meant_by(name: str, known: Iterable[str]) -> str | None:
    """The one of the ``known`` names for which ``name`` may be misspelt."""
    return next(iter(get_close_matches(name, known, 1, cutoff=0.85)), None)


def whole(number: Any) -> int:
    """``number`` as an int; TypeError unless it is an integer, and not a bool."""
    if isinstance(number, bool):
        raise TypeError(f"an integer is expected; got {number}")
    return operator.index(number)


def parsed_device(device: Any, name: str) -> torch.device:
    """``device``, called ``name`` in errors, as a ``torch.device`` with tensors, whose work a pipeline can order."""
    if isinstance(device, bool) or not isinstance(device, (torch.device, int, str)):
        raise TypeError(f"{name} must be a torch.device, a number or a name such as 'cuda:0' or 'cpu'; got {device!r}")
    try:
        place = torch.device(device)
        if place.type not in ("cpu", "meta"):
            _expect_usable(place)
    except (RuntimeError, NotImplementedError, AssertionError, AttributeError, ImportError) as error:
        first = str(error).partition("\n")[0]  # messages of torch may have many lines
        raise ValueError(
            f"{name} is {str(device)!r}, which is not a device that can be used here: {first}; "
            "devices=['cpu', ...] runs on the CPU"
        ) from None
    return numbered(place)


def numbered(device: torch.device) -> torch.device:
    """``device`` with the number of its accelerator, so that ``cuda`` and ``cuda:0`` are equal.

    The numbers of CPUs do not change: stages on CPUs of the same number share a worker.
    """
    if device.index is None and has_streams(device):
        return torch.device(device.type, torch.accelerator.current_device_index())
    return device


def _expect_usable(device: torch.device) -> None:
    """Raise RuntimeError, or what the device's backend raises, unless there are tensors, streams and events."""
    torch.empty(0, device=device)
    if not has_streams(device):
        here = torch.accelerator.current_accelerator()
        raise RuntimeError(
            f"a pipeline orders its work by the streams of torch.accelerator, which is {here and str(here)!r} here and "
            f"knows no {device.type!r} devices"
        )
    wait_event(current_stream(device), record_event(new_stream(device)))
