"""Validate the arguments of a pipe before anything changes. Errors name the argument."""

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


def check_chunks(chunks: Any) -> int:
    try:
        number = int(chunks) if isinstance(chunks, float) and chunks.is_integer() else whole(chunks)
    except TypeError:
        raise TypeError(
            f"chunks must be an int, the number of micro-batches of a mini-batch, as in chunks=8; got {chunks!r}"
        ) from None
    if number <= 0:
        raise ValueError(f"number of chunks must be positive integer (chunks: {chunks})")
    return number


def check_mode(mode: Any, name: str = "checkpoint") -> str:
    text = str(mode)
    if text not in CHECKPOINT_MODES:
        modes = ", ".join(map(repr, CHECKPOINT_MODES))
        raise ValueError(f"{name} is not one of {modes}: {text!r}")
    return text


def check_flag(name: str, flag: Any) -> bool:
    if isinstance(flag, int) and flag in (0, 1):
        return bool(flag)
    raise TypeError(f"{name} must be True or False; got {flag!r}")


def check_offload(offload: Any) -> bool | torch.dtype:
    if isinstance(offload, torch.dtype) and offload.is_floating_point:
        return offload
    if isinstance(offload, int) and offload in (0, 1):
        return bool(offload)
    raise TypeError(
        "offload must be True, False, or the floating-point dtype in which stages compute, such as torch.bfloat16; "
        f"got {offload!r}"
    )


def check_devices(devices: Any, partitions: int) -> list[torch.device]:
    """Return at most ``partitions`` of the ``devices``; by default all accelerators, else one CPU per partition."""
    if devices is not None:
        example = f"devices={['cpu'] * max(1, partitions)!r}"
        given = to_list("devices", devices, "a list of devices, one per partition", example, partitions)
        return [parse_device(device, f"devices[{j}]") for j, device in enumerate(given)]
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is not None and here.type != "mps":  # there is only one MPS device
        return [torch.device(here.type, k) for k in range(torch.accelerator.device_count())]
    return [torch.device("cpu")] * partitions


def check_places(devices: Any, partitions: int) -> list[torch.device]:
    """Return one device per partition; IndexError if there are too few."""
    places = check_devices(devices, partitions)
    if len(places) < partitions:
        raise IndexError(
            f"too few devices to hold given partitions (devices: {len(places)}, partitions: {partitions}); a device "
            "can be listed more than once"
        )
    return places[:partitions]


def to_list(name: str, given: Any, what: str, example: str, most: int | None = None) -> list[Any]:
    """Return the first ``most`` entries of ``given`` as a list; TypeError if it is not an ordered iterable."""
    try:
        entries = iter(given)
    except TypeError:  # a 0-dim tensor has __iter__, but raises as well
        entries = None
    if entries is None or isinstance(given, (str, bytes, set, frozenset, dict)):
        raise TypeError(f"{name} must be {what}, as in {example}; got {given!r}")
    return list(islice(entries, most))


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the ``known`` name that ``name`` probably misspells."""
    return next(iter(get_close_matches(name, known, 1, cutoff=0.85)), None)


def whole(number: Any) -> int:
    """Return ``number`` as an int; TypeError if it is not an integer, or is a bool."""
    if isinstance(number, bool):
        raise TypeError(f"expected an integer; got {number}")
    return operator.index(number)


def parse_device(device: Any, name: str) -> torch.device:
    """Return ``device``, called ``name`` in errors, as a ``torch.device`` that a pipeline can run on."""
    if isinstance(device, bool) or not isinstance(device, (torch.device, int, str)):
        raise TypeError(f"{name} must be a torch.device, an index or a name such as 'cuda:0' or 'cpu'; got {device!r}")
    try:
        place = torch.device(device)
        if place.type not in ("cpu", "meta"):
            _expect_usable(place)
    except (RuntimeError, NotImplementedError, AssertionError, AttributeError, ImportError) as error:
        first = str(error).partition("\n")[0]  # torch's message may have many lines
        raise ValueError(
            f"{name} is {str(device)!r}, which cannot be used here: {first}; devices=['cpu', ...] runs on the CPU"
        ) from None
    return add_index(place)


def add_index(device: torch.device) -> torch.device:
    """Return ``device`` with the index of its accelerator, so that ``cuda`` and ``cuda:0`` are equal.

    CPUs are unchanged: stages on CPUs with the same index share a worker.
    """
    if device.index is None and has_streams(device):
        return torch.device(device.type, torch.accelerator.current_device_index())
    return device


def _expect_usable(device: torch.device) -> None:
    """Raise RuntimeError, or the error of the backend, unless ``device`` has tensors, streams and events."""
    torch.empty(0, device=device)
    if not has_streams(device):
        here = torch.accelerator.current_accelerator()
        raise RuntimeError(
            f"a pipeline needs the streams of torch.accelerator, which is {here and str(here)!r} here and does not "
            f"support {device.type!r} devices"
        )
    wait_event(current_stream(device), record_event(new_stream(device)))
