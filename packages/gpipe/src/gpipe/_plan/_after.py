"""Plan again after a step that ran out of memory, with a lower limit for its device."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from profiler.text import format_bytes

from ..engine._failed_cell import FailedCell, causes, failed_cell, is_out_of_memory
from ._arguments import SCHEDULES
from ._candidate import Space

LESS = 0.9
"""The share, of the bytes that did not fit, that the next plan may use: predictions are accurate to a tenth."""


class Shortage(NamedTuple):
    """Where memory ran out.

    Attributes:
        device: its number among those that are planned for.
        cell: what ran out of it; None if the error says no more than the device.
    """

    device: int
    cell: FailedCell | None


def read_after(after: Any, places: Sequence[torch.device], layers: int) -> Shortage | None:
    """Where the error ``after`` says that memory ran out; None if there is none.

    Raises:
        TypeError: it is no error.
        ValueError: memory did not run out, or on none of the devices, or in another model.
    """
    if after is None:
        return None
    if not isinstance(after, BaseException):
        raise TypeError(f"after: expected the error that a step has raised, got {type(after).__name__}")
    if not is_out_of_memory(after):
        raise ValueError(f"after: expected an error that says that memory ran out, got {after!r}")
    cell = failed_cell(after)
    if cell is not None and cell.end > layers:
        raise ValueError(f"after: the error is of a model of at least {cell.end} layers; this one has {layers}")
    return Shortage(_device_of(after, cell, places), cell)


def _device_of(after: BaseException, cell: FailedCell | None, places: Sequence[torch.device]) -> int:
    names = list(map(str, places))
    if cell is not None and names.count(cell.device) > 1 and names[min(cell.stage, len(names) - 1)] == cell.device:
        return cell.stage  # CPUs have one name
    name = cell.device if cell is not None else _named(after)
    if name in names:
        return names.index(name)
    if name is None and len(names) == 1:
        return 0
    where = "does not say where" if name is None else f"is of {name}"
    raise ValueError(
        f"after: the error {where}, and the devices are {', '.join(names)}; give the one that a step of a pipe on "
        "these devices has raised, as it was raised"
    )


def _named(error: BaseException) -> str | None:
    """The GPU that the text of CUDA's allocator is about."""
    found = [match for each in causes(error) if (match := re.search(r"\bGPU (\d+) has a total capacity", str(each)))]
    return f"cuda:{found[0][1]}" if found else None


def lowered(space: Space, shortage: Shortage, name: str) -> tuple[Space, str]:
    """``space`` with less memory on the device that ran out of it, and why.

    What was predicted for the stage there has not fitted. So the next plan stays a tenth below that.

    Args:
        space: what would be searched.
        shortage: where memory ran out.
        name: of the device.

    Raises:
        ValueError: the capacity of the device is unknown, and the error does not say what it held.
    """
    j, room = shortage.device, space.memory[shortage.device]
    expected = _expected(space, shortage)
    if expected is None and room is None:
        raise ValueError(
            f"after: it is not known what device {j} ({name}) holds; give memory=..., and a tenth less counts"
        )
    limit = min(size for size in (expected, room) if size is not None)
    # A stage that was not expected to fit tells nothing new.
    less = limit if expected is not None and room is not None and expected > room else round(LESS * limit)
    memory = [less if k == j else size for k, size in enumerate(space.memory)]
    held = "" if expected is None else f", with {format_bytes(expected)} expected there"
    what = "memory" if shortage.cell is None else f"memory in {shortage.cell}"
    note = f"after a step that ran out of {what}{held}: device {j} ({name}) counts as {format_bytes(less)}"
    return replace(space, memory=memory), note


def _expected(space: Space, shortage: Shortage) -> int | None:
    """What would have been predicted for the stage that ran out of memory."""
    cell, measured = shortage.cell, space.measured
    if cell is None or cell.stages != measured.stages:
        return None
    before, after = cell.stage, cell.stages - cell.stage - 1
    # Where the other stages are cut makes no difference to this one.
    sizes = [*_spread(cell.first, before), cell.end - cell.first, *_spread(measured.layers - cell.end, after)]
    m = min(cell.microbatches, measured.rows)
    mode = {0: "never", cell.microbatches: "always"}.get(cell.checkpoint_stop, "except_last")
    way = cell.flags or mode
    schedule = cell.schedule if cell.schedule in SCHEDULES else "1f1b"
    return measured.cut(m).bytes_of(cell.stage, sizes, way, schedule, cell.split).total


def _spread(layers: int, stages: int) -> list[int]:
    return [layers - stages + 1, *[1] * (stages - 1)] if stages else []
