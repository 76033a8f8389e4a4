"""Validate the arguments of ``plan`` before anything is measured. Errors name the argument."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn

from microbatch import Batch, check, scatter

from ..module._arguments import check_chunks, check_mode, to_list
from ..module._split_batch import check_batch, expect_same_rows
from ..schedule import looped_placement
from ..schedule._named import BREADTH_FIRST, expect_name, usual_placement

SCHEDULES = ("1f1b", "zero_bubble", "fill_drain", "interleaved", "interleaved_zero_bubble", "zbv")
"""The schedules to search. If several are equally fast, the first one is preferred."""

WAITING = ("fill_drain", BREADTH_FIRST)
"""The schedules whose backwards start after the last forward has finished."""

ALL = 1 << 16
"""More devices than there are."""

LOOPS = 2
"""The number of stages per device under interleaved and V-shaped schedules."""

SEARCH = "search"
"""The name of a schedule that is searched for the costs of the stages."""

MODES = ("never", "except_last", "always")
"""The checkpoint modes to search. On devices with their own memory, the search includes :data:`OFFLOAD`."""

OFFLOAD = "offload"
"""The checkpoint mode in which saved tensors are on the host."""

COUNTED = re.compile(r"\s*(\d+)\s*x\s*(\S.*?)\s*")
"""A number of hypothetical devices, and their name or memory."""

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([kKMGTP]?)(i?)B\s*")
"""A number and a unit with a capital B. A lowercase ``b`` could mean bits, and a bare 80 could mean 80 GB."""


def expect_rows(sample: Any) -> None:
    """Raise TypeError or ValueError unless ``sample`` is a mini-batch: tensors with at least one row."""
    check(sample, root="sample")
    shapes = [tuple(tensor.shape) for tensor in Batch(sample)]
    if not shapes or not all(shape and shape[0] for shape in shapes):
        found = ", ".join(map(str, shapes)) or repr(sample)
        raise ValueError(f"sample: expected a mini-batch of tensors with at least one row, got shapes {found}")


def list_devices(devices: Any, model: nn.Module) -> Any:
    """Return ``devices``; a list if they are an iterator, which may be endless."""
    return [*islice(devices, 1 + sum(1 for _ in model.modules()))] if isinstance(devices, Iterator) else devices


def split_count(text: str) -> tuple[int, str]:
    """Return the number of hypothetical devices in a text, and their name or memory.

    >>> split_count("2x24GB"), split_count("H100")
    ((2, '24GB'), (1, 'H100'))
    """
    match = COUNTED.fullmatch(text)
    return (int(match[1]), match[2]) if match else (1, text)


class Facts(NamedTuple):
    """The speed and memory of a device, if the caller passes them."""

    speed: float | None = None
    memory: int | None = None


def read_facts(devices: Any) -> tuple[Any, list[Facts]]:
    """Separate devices from their :class:`Facts`; these are empty if no device has any.

    >>> names, facts = read_facts([("2x24GB", {"speed": 0.5}), "80GB"])
    >>> names, [each.speed for each in facts]
    (['24GB', '24GB', '80GB'], [0.5, 0.5, None])
    """
    devices = [devices] if _has_facts(devices) else devices
    if not isinstance(devices, (list, tuple)) or not any(map(_has_facts, devices)):
        return devices, []
    names, facts = list[Any](), list[Facts]()
    for j, each in enumerate(devices):
        name, said = each if _has_facts(each) else (each, {})
        count, name = split_count(name) if isinstance(name, str) else (1, name)
        names += [name] * count
        facts += [_facts(said, f"devices[{j}]")] * count
    return names, facts


def _has_facts(device: Any) -> bool:
    return isinstance(device, (list, tuple)) and len(device) == 2 and isinstance(device[1], Mapping)


def _facts(said: Mapping[str, Any], name: str) -> Facts:
    if unknown := [key for key in said if key not in Facts._fields]:
        raise ValueError(f"{name}: expected {' or '.join(Facts._fields)}, got {unknown[0]!r}")
    speed, memory = said.get("speed"), said.get("memory")
    return Facts(
        None if speed is None else _read_speed(speed, f"{name}['speed']"),
        None if memory is None else read_bytes(memory, f"{name}['memory']"),
    )


def count_rows(sample: Any) -> int:
    """Return the smallest number of rows of the tensors in a mini-batch; 0 without rows."""
    return min((len(tensor) if tensor.dim() else 0 for tensor in Batch(sample)), default=0)


def expect_target(target: Any, sample: Any) -> None:
    """Raise the same error as a step if ``target`` cannot be split into the micro-batches of ``sample``."""
    if target is not None:
        value = check_batch(target, None, "target")
        expect_same_rows(scatter(value.bare, 1, value.spec, "target"), scatter(sample, 1))


def is_size(text: str) -> bool:
    return _SIZE.fullmatch(text) is not None


def read_bytes(size: int | float | str, name: str = "memory") -> int:
    """Return a number of bytes, given as a number or as text.

    >>> read_bytes("80GB"), read_bytes("1.5 GiB"), read_bytes(4096)
    (80000000000, 1610612736, 4096)
    """
    expected = f"{name}: expected bytes, such as 8_000_000_000, '80GB' (powers of 1000) or '80GiB' (powers of 1024)"
    if isinstance(size, bool) or not isinstance(size, (int, float, str)):
        raise TypeError(f"{expected}; got {size!r}")
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if isinstance(size, str) and match is None:
        raise ValueError(f"{expected}; got {size!r}")
    power = " KMGTP".find(match[2].upper() or " ") if match else 0
    found = float(match[1]) * (1024 if match[3] else 1000) ** power if match else float(size)
    if not 0 < found < float("inf"):
        raise ValueError(f"{expected}; got {size!r}, which is not positive")
    return round(found)


def read_memory(
    memory: Any, devices: Sequence[torch.device], facts: Sequence[Facts] = (), sizes: Sequence[int] | None = None
) -> list[int | None]:
    """Return the limit of each device: as given, or by default its memory, and None for a CPU.

    Args:
        memory: the argument of ``plan``.
        devices: the devices.
        facts: the caller's facts about each device, if any.
        sizes: the memory of hypothetical devices.
    """
    own = [each.memory for each in facts]
    if memory is not None and any(size is not None for size in own):
        raise ValueError(f"memory: expected None, since devices= says the memory of a device; got {memory!r}")
    if memory is None:
        known = [_get_total_memory(device) for device in devices] if sizes is None else sizes
        return [default if size is None else size for size, default in zip(own or known, known, strict=True)]
    if isinstance(memory, (str, int, float)):
        return [read_bytes(memory)] * len(devices)
    given = to_list("memory", memory, "a size, or a list with one per device", f"memory={['80GB'] * len(devices)!r}")
    if len(given) != len(devices):
        raise ValueError(f"memory: expected one size, or one per device ({len(devices)}), got {len(given)}")
    return [None if size is None else read_bytes(size, f"memory[{j}]") for j, size in enumerate(given)]


def read_speeds(speeds: Any, devices: int, facts: Sequence[Facts] = ()) -> list[float | None]:
    """Return the relative speed of each device; None if the caller does not pass it."""
    own = [each.speed for each in facts] or [None] * devices
    if speeds is None:
        return own
    if any(speed is not None for speed in own):
        raise ValueError(f"speeds: expected None, since devices= says the speed of a device; got {speeds!r}")
    given = to_list("speeds", speeds, "a list with one number per device", f"speeds={[1.0] * devices!r}")
    if len(given) != devices:
        raise ValueError(f"speeds: expected one per device ({devices}), got {len(given)}")
    return [None if speed is None else _read_speed(speed, f"speeds[{j}]") for j, speed in enumerate(given)]


def _read_speed(speed: Any, name: str) -> float:
    if isinstance(speed, bool) or not isinstance(speed, (int, float)):
        raise TypeError(f"{name}: expected a number, got {speed!r}")
    if not 0 < speed < float("inf"):
        raise ValueError(f"{name}: expected a positive, finite number, got {speed!r}")
    return float(speed)


def _get_total_memory(device: torch.device) -> int | None:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def read_chunks(chunks: Any, rows: int, least: int = 1) -> list[int]:
    """Return the numbers of micro-batches to search.

    Without ``chunks``, these are numbers that split ``rows`` into micro-batches of at least ``least`` rows.
    """
    if chunks is None:
        powers = [2**k for k in range(rows.bit_length())]
        candidates = {1, *powers, *(3 * power for power in powers), *(-(-rows // power) for power in powers)}
        even = (m for m in candidates if m <= rows and _count_microbatches(rows, m) == m)
        return sorted(
            m for m in even if m == 1 or rows - (m - 1) * -(-rows // m) >= least
        )  # the last micro-batch is the smallest
    given = [chunks] if isinstance(chunks, int) else to_list("chunks", chunks, "a number, or a list", "chunks=[4, 8]")
    numbers = sorted({check_chunks(number) for number in given})
    if not numbers or numbers[-1] > rows:
        raise ValueError(f"chunks: expected numbers from 1 to {rows}, the number of rows of the sample, got {chunks!r}")
    return sorted({_count_microbatches(rows, number) for number in numbers})


def _count_microbatches(rows: int, chunks: int) -> int:
    """Return the number of micro-batches that a pipe with ``chunks`` makes of ``rows``."""
    return -(-rows // -(-rows // chunks))


def read_schedules(schedule: str | None) -> Sequence[str]:
    if schedule is None:
        return SCHEDULES
    if not isinstance(schedule, str):
        raise TypeError(f"schedule: expected the name of a schedule, such as '1f1b'; got {schedule!r}")
    expect_name(schedule, (*SCHEDULES, SEARCH))
    return SCHEDULES if schedule.lower() == SEARCH else (schedule.lower(),)


def list_placements(schedules: Sequence[str], devices: int, layers: int) -> dict[tuple[int, ...], list[str]]:
    """Return the placements of stages to search, with the schedules for each. One stage per device comes last.

    >>> list_placements(["1f1b", "zbv"], devices=2, layers=4)
    {(0, 1, 1, 0): ['zbv'], (0, 1): ['1f1b']}
    """
    found: dict[tuple[int, ...], list[str]] = {}
    for name in reversed(schedules):
        found.setdefault(_placement(name, devices), []).insert(0, name)
    return {each: names for each, names in found.items() if len(each) == devices or 1 < devices <= layers // LOOPS}


def _placement(name: str, devices: int) -> tuple[int, ...]:
    if name in ("interleaved", "interleaved_zero_bubble"):
        return tuple(looped_placement(LOOPS * devices, devices))
    return tuple(usual_placement(name, devices * LOOPS if name == "zbv" else devices))


def read_modes(checkpoint: str | None, *, separate_memory: bool) -> Sequence[str]:
    """Return the checkpoint modes to search.

    Args:
        checkpoint: the only one, or None to search.
        separate_memory: whether devices have their own memory.
    """
    if checkpoint is not None:
        return (check_mode(checkpoint),)
    return (*MODES, OFFLOAD) if separate_memory else MODES
